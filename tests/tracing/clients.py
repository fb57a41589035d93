"""Differentiate functions that the project did not write; `python -m tests.tracing.clients` writes the state of each.

A state is "right" (the gradient is that of central differences in float64), "wrong", "refused" with the reason, or
"not applicable": the library has no such function, or the function does not take its arrays. The states are in
docs/libraries/derivatives.json, of which `python docs/library_tables.py` makes the table of the page on derivatives.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pathlib
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

os.environ["SCIPY_ARRAY_API"] = "1"  # before SciPy is imported

import array_api_compat
import array_api_extra as xpx
import einops
import einops.array_api
import numpy as np
import opt_einsum
import scipy.cluster
import scipy.differentiate
import scipy.fft
import scipy.integrate
import scipy.interpolate
import scipy.linalg
import scipy.ndimage
import scipy.optimize.elementwise
import scipy.signal
import scipy.spatial.transform
import scipy.special
import scipy.stats
import sklearn
import sklearn.metrics.pairwise
import sklearn.preprocessing
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.mixture import GaussianMixture
from sklearn.naive_bayes import GaussianNB

import xformer as xf
from xformer.backends import from_host, resolve, to_host
from xformer.errors import XformerError

PACKAGES = ("numpy", "scipy", "scikit-learn", "array-api-compat", "array-api-extra", "einops", "opt-einsum")
RANDOM = np.random.default_rng(0)
A, B = RANDOM.random((2, 6, 4)) + 0.1
S, V = RANDOM.random((4, 4)) + 4 * np.eye(4), RANDOM.random(8) + 0.2
# Arguments of the differentiated function without a derivative, which so are constants of its namespace.
CONSTANTS = {
    "b": B,
    "s": S,
    "v": V,
    "labels": np.asarray([0, 1, 0, 1, 1, 0]),
    "grid": np.arange(8.0),
    "places": np.asarray([0.5, 1.5]),
}
CASES: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {}
MISSING: dict[str, str] = {}


def case(name: str, function: Callable[[Any, Any], Any], x: Any = A) -> None:
    CASES[name] = function, x


def each(
    prefix: str, module: Any, names: str, call: Callable[[Any, Any, Any], Any] = lambda f, x, c: f(x), x: Any = A
) -> None:
    for name in names.split():
        if hasattr(module, name):
            case(f"{prefix}.{name}", lambda x, c, name=name: call(getattr(module, name), x, c), x)
        else:
            MISSING[f"{prefix}.{name}"] = "the installed version lacks it"


def array(c: Any, values: Any) -> Any:
    return c.xp.asarray(values, dtype=c.xp.float64)


def size(z: Any) -> Any:
    return xf.array_namespace(z).abs(z)


# --- scipy ----------------------------------------------------------------------------------------------------------

special, stats, signal = scipy.special, scipy.stats, scipy.signal
each("scipy.special", special, "logsumexp softmax log_softmax", lambda f, x, c: f(x, axis=-1))
each(
    "scipy.special",
    special,
    "expit log_expit logit erf erfc entr gammaln i0 i1 i0e i1e log_ndtr ndtr ndtri sinc digamma",
    x=A * 0.8,
)
each("scipy.special", special, "xlogy rel_entr kl_div betaln", lambda f, x, c: f(x, c.b))
case("scipy.special.huber", lambda x, c: special.huber(0.5, x))
case("scipy.special.logsumexp with weights", lambda x, c: special.logsumexp(x, axis=0, b=c.b))

each(
    "scipy.stats",
    stats,
    "zscore skew kurtosis variation gmean hmean circmean circvar circstd sem gstd tmean tvar tstd tmin tmax tsem iqr",
)
each(
    "scipy.stats",
    stats,
    "median_abs_deviation entropy differential_entropy expectile mode moment lmoment jarque_bera bayes_mvs",
)
each("scipy.stats", stats, "kstat kstatvar sigmaclip", lambda f, x, c: f(x[:, 0]))
each("scipy.stats", stats, "boxcox_llf yeojohnson_llf", lambda f, x, c: f(1.0, x[:, 0]))
each("scipy.stats", stats, "normaltest skewtest kurtosistest", x=RANDOM.random((24, 2)))
each("scipy.stats", stats, "zmap", lambda f, x, c: f(x, c.b))
each("scipy.stats", stats, "pearsonr ttest_ind ttest_rel f_oneway bartlett", lambda f, x, c: f(x, c.b).statistic)
each("scipy.stats", stats, "linregress siegelslopes theilslopes", lambda f, x, c: f(x[:, 0], c.b[:, 0]).slope)
case("scipy.stats.pmean", lambda x, c: stats.pmean(x, 2.5))
case("scipy.stats.quantile", lambda x, c: stats.quantile(x, 0.3))
case("scipy.stats.trim_mean", lambda x, c: stats.trim_mean(x, 0.1))
case("scipy.stats.describe", lambda x, c: stats.describe(x).variance)
case("scipy.stats.spearmanr", lambda x, c: stats.spearmanr(x).statistic)
case("scipy.stats.ttest_1samp", lambda x, c: stats.ttest_1samp(x, 0.1).statistic)
case("scipy.stats.ttest_ind p-value", lambda x, c: stats.ttest_ind(x, c.b).pvalue)
case("scipy.stats.levene", lambda x, c: stats.levene(x[:, 0], x[:, 1]).statistic)
case("scipy.stats.chisquare", lambda x, c: stats.chisquare(x[:, 0], c.b[:, 0], sum_check=False).statistic)
case("scipy.stats.power_divergence", lambda x, c: stats.power_divergence(x[:, 0], lambda_=1).statistic)
case("scipy.stats.Normal.logpdf", lambda x, c: stats.Normal(mu=0.1, sigma=1.3).logpdf(x))
case("scipy.stats.norm.logpdf", lambda x, c: stats.norm.logpdf(x))
case("scipy.stats.multivariate_normal.logpdf", lambda x, c: stats.multivariate_normal(np.zeros(4)).logpdf(x))
case("scipy.stats.directional_stats", lambda x, c: stats.directional_stats(x).mean_direction)
case("scipy.stats.rankdata", lambda x, c: stats.rankdata(x, axis=0) * x)
case("scipy.stats.cumfreq", lambda x, c: stats.cumfreq(x[:, 0]).cumcount)
case("scipy.stats.mstats.winsorize", lambda x, c: stats.mstats.winsorize(x))

case("scipy.signal.detrend constant", lambda x, c: signal.detrend(x, axis=0, type="constant"))
case("scipy.signal.detrend linear", lambda x, c: signal.detrend(x, axis=0))
each("scipy.signal", signal, "convolve correlate", lambda f, x, c: f(x[:, 0], c.v[:3], method="direct"))
case("scipy.signal.fftconvolve", lambda x, c: signal.fftconvolve(x, c.b, axes=0))
case("scipy.signal.oaconvolve", lambda x, c: signal.oaconvolve(x[:, 0], c.v[:3]))
case("scipy.signal.hilbert", lambda x, c: size(signal.hilbert(x, axis=0)))
case("scipy.signal.lfilter", lambda x, c: signal.lfilter(array(c, [1.0, 0.5]), array(c, [1.0, 0.2]), x, axis=0))
case("scipy.signal.sosfilt", lambda x, c: signal.sosfilt(array(c, [[1.0, 0.5, 0, 1, 0.2, 0]]), x, axis=0))
case("scipy.signal.savgol_filter", lambda x, c: signal.savgol_filter(x, 5, 2, axis=0))
case("scipy.signal.welch", lambda x, c: signal.welch(x[:, 0], nperseg=4)[1])
case("scipy.signal.periodogram", lambda x, c: signal.periodogram(x[:, 0])[1])
case("scipy.signal.freqz", lambda x, c: size(signal.freqz(x[:, 0], worN=8)[1]))
case("scipy.signal.normalize", lambda x, c: signal.normalize(x[:, 0], array(c, [2.0, 1.0]))[0])
case("scipy.signal.resample", lambda x, c: signal.resample(x, 8, axis=0))
case("scipy.signal.envelope", lambda x, c: signal.envelope(x, axis=0))
case("scipy.signal.chirp", lambda x, c: signal.chirp(x, 1.0, 1.0, 2.0))
case("scipy.signal.vectorstrength", lambda x, c: signal.vectorstrength(x[:, 0], 0.7)[0])
each("scipy.signal", signal, "medfilt2d sawtooth gausspulse")
each("scipy.signal", signal, "bilinear lp2hp", lambda f, x, c: f(x[:3, 0], x[:3, 1])[0])
case("scipy.signal.zpk2tf", lambda x, c: signal.zpk2tf(x[:2, 0], x[:3, 1], 1.0)[1])
MISSING["scipy.signal.unit_impulse"] = "no array is an argument"

integrate = scipy.integrate
each(
    "scipy.integrate",
    integrate,
    "trapezoid cumulative_trapezoid simpson cumulative_simpson",
    lambda f, x, c: f(x**2, dx=0.1),
)
case("scipy.integrate.romb", lambda x, c: integrate.romb(x), RANDOM.random((5, 5)))
case(
    "scipy.integrate.tanhsinh, a parameter",
    lambda x, c: integrate.tanhsinh(lambda t: t * x[0, 0], c.xp.asarray(0.0), c.xp.asarray(1.0)).integral,
)
case(
    "scipy.integrate.cubature, a parameter",
    lambda x, c: integrate.cubature(lambda t: t[:, 0] * x[0, 0], array(c, [0.0]), array(c, [1.0])).estimate,
)
case("scipy.integrate.fixed_quad, a parameter", lambda x, c: integrate.fixed_quad(lambda t: x[0, 0] * t, 0.0, 1.0)[0])
case("scipy.ndimage.gaussian_filter", lambda x, c: scipy.ndimage.gaussian_filter(x, 1.0))
case("scipy.fft.fft", lambda x, c: size(scipy.fft.fft(x)))
case("scipy.fft.dct", lambda x, c: scipy.fft.dct(x))
each("scipy.linalg", scipy.linalg, "norm")
each("scipy.linalg", scipy.linalg, "expm", x=S / 8)
each("scipy.linalg", scipy.linalg, "det", x=S)
each("scipy.linalg", scipy.linalg, "solve", lambda f, x, c: f(x, c.v[:4]), S)
case(
    "scipy.spatial.transform.Rotation.from_quat",
    lambda x, c: scipy.spatial.transform.Rotation.from_quat(x).apply(array(c, [1.0, 2.0, 3.0])),
    V[:4],
)
case(
    "scipy.spatial.transform.Rotation.from_rotvec",
    lambda x, c: scipy.spatial.transform.Rotation.from_rotvec(x).as_matrix(),
    V[:3],
)
case("scipy.spatial.distance.cdist", lambda x, c: scipy.spatial.distance.cdist(x, c.b))
each("scipy.optimize", scipy.optimize, "rosen rosen_der rosen_hess", lambda f, x, c: f(x[:, 0]))
case(
    "scipy.optimize.elementwise.find_root, a parameter",
    lambda x, c: (
        scipy.optimize.elementwise.find_root(lambda t: t**2 - x[0, 0], (c.xp.asarray(0.0), c.xp.asarray(3.0))).x
    ),
)
case("scipy.cluster.vq.whiten", lambda x, c: scipy.cluster.vq.whiten(x))
case("scipy.cluster.vq.vq", lambda x, c: scipy.cluster.vq.vq(x, c.b[:2])[1])
case("scipy.differentiate.derivative", lambda x, c: scipy.differentiate.derivative(lambda t: t**3 * 1.0, x[0, :2]).df)
case(
    "scipy.interpolate.BarycentricInterpolator",
    lambda x, c: scipy.interpolate.BarycentricInterpolator(c.grid, x)(c.places),
    V,
)
case("scipy.interpolate.RBFInterpolator", lambda x, c: scipy.interpolate.RBFInterpolator(c.b, x[:, 0])(c.b[:2]))
each(
    "scipy.interpolate",
    scipy.interpolate,
    "make_interp_spline CubicSpline PchipInterpolator Akima1DInterpolator",
    lambda f, x, c: f(c.grid, x)(c.places),
    V,
)

# --- the extensions of the standard ---------------------------------------------------------------------------------


def standard(name: str, call: Callable[[Any, Any, Any], Any], x: Any = A) -> None:
    extension, short = name.split(".")
    case(f"xp.{name}", lambda x, c: call(getattr(getattr(c.xp, extension), short), x, c), x)


standard("linalg.vector_norm", lambda f, x, c: f(x))
standard("linalg.matmul", lambda f, x, c: f(x, c.b.T))
standard("linalg.cross", lambda f, x, c: f(x, c.b[:, :3]), A[:, :3])
standard("linalg.outer", lambda f, x, c: f(x, c.v), V)
standard("linalg.cholesky", lambda f, x, c: f(x + x.T), S)
standard("linalg.slogdet", lambda f, x, c: f(x)[1], S)
for _name in ("trace", "diagonal", "inv"):
    standard(f"linalg.{_name}", lambda f, x, c: f(x), S)
standard("fft.rfft", lambda f, x, c: size(f(x)))

# --- scikit-learn ---------------------------------------------------------------------------------------------------

metrics, preprocessing = sklearn.metrics, sklearn.preprocessing
each(
    "sklearn.preprocessing",
    preprocessing,
    "MinMaxScaler MaxAbsScaler StandardScaler Normalizer PolynomialFeatures",
    lambda f, x, c: f().fit_transform(x) ** 2,
)
each("sklearn.preprocessing", preprocessing, "KernelCenterer", lambda f, x, c: f().fit_transform(x) ** 2, S @ S.T)
PAIRS = (
    "euclidean_distances rbf_kernel cosine_similarity linear_kernel polynomial_kernel sigmoid_kernel cosine_distances"
)
PAIRS += " laplacian_kernel chi2_kernel additive_chi2_kernel paired_euclidean_distances paired_cosine_distances"
PAIRS += " manhattan_distances pairwise_distances"
each("sklearn.metrics.pairwise", metrics.pairwise, PAIRS, lambda f, x, c: f(x, c.b))
SCORES = "mean_squared_error mean_absolute_error r2_score mean_tweedie_deviance mean_poisson_deviance max_error"
SCORES += " mean_gamma_deviance explained_variance_score mean_pinball_loss d2_absolute_error_score"
SCORES += " root_mean_squared_error mean_squared_log_error"
each("sklearn.metrics", metrics, SCORES, lambda f, x, c: f(c.b[:, 0], x[:, 0]))
each("sklearn.metrics", metrics, "log_loss brier_score_loss", lambda f, x, c: f(c.labels, x[:, 0] * 0.5))
case("sklearn PCA.fit_transform", lambda x, c: PCA(2, svd_solver="covariance_eigh").fit_transform(x) ** 2)
case("sklearn PCA.transform", lambda x, c: PCA(2, svd_solver="full").fit(c.b).transform(x))
case("sklearn Ridge.fit, the inputs", lambda x, c: Ridge(solver="svd").fit(x, c.b[:, 0]).coef_)
case("sklearn Ridge.fit, the targets", lambda x, c: Ridge(solver="svd").fit(c.b, x[:, 0]).coef_)
case("sklearn Ridge.predict", lambda x, c: Ridge(solver="svd").fit(c.b, c.b[:, 0]).predict(x))
case("sklearn LinearRegression.fit", lambda x, c: LinearRegression().fit(x, c.b[:, 0]).coef_)
case(
    "sklearn LinearDiscriminantAnalysis",
    lambda x, c: LinearDiscriminantAnalysis().fit(x, c.labels).decision_function(x),
)
case(
    "sklearn GaussianMixture.score_samples",
    lambda x, c: GaussianMixture(1, init_params="random").fit(c.b).score_samples(x),
)
case("sklearn GaussianNB.predict_log_proba", lambda x, c: GaussianNB().fit(c.b, c.labels).predict_log_proba(x))
case("sklearn Nystroem.transform", lambda x, c: Nystroem(n_components=3, random_state=0).fit(c.b).transform(x))
case("sklearn StandardScaler.transform", lambda x, c: preprocessing.StandardScaler().fit(c.b).transform(x) ** 2)

# --- array-api-extra, array-api-compat, einops, opt_einsum ----------------------------------------------------------

each("array_api_extra", xpx, "cov sinc nan_to_num softmax median angle")
each("array_api_extra", xpx, "create_diagonal", x=V)
each("array_api_extra", xpx, "kron", lambda f, x, c: f(x, c.s), S)
each("array_api_extra", xpx, "quantile", lambda f, x, c: f(x, c.places / 2))
each("array_api_extra", xpx, "setdiff1d", lambda f, x, c: f(x[:, 0], c.b[:, 0]))
case("array_api_extra.atleast_nd", lambda x, c: xpx.atleast_nd(x, ndim=3))
case("array_api_extra.pad", lambda x, c: xpx.pad(x, 2))
case("array_api_extra.expand_dims", lambda x, c: xpx.expand_dims(x, axis=(0, 2)))
case("array_api_extra.apply_where", lambda x, c: xpx.apply_where(x > 0.5, x, lambda t: t**2, lambda t: -t))
case("array_api_extra.at.multiply", lambda x, c: xpx.at(x, (slice(0, 2),)).multiply(3.0))
case("array_api_extra.at.add", lambda x, c: xpx.at(x)[0, 1].add(3.0) * x)
case("array_api_extra.at.set", lambda x, c: xpx.at(x)[x > 0.5].set(0.0, copy=True))
case("array_api_extra.one_hot", lambda x, c: xpx.one_hot(c.labels, 2) * x[0, 0])
case("array_api_extra.isclose", lambda x, c: x * xpx.isclose(x, x))
case("array_api_extra.default_dtype", lambda x, c: x * (xpx.default_dtype(c.xp) is not None))
case("array_api_extra.partition", lambda x, c: c.xp.sum(xpx.partition(x, 2)[..., :2] ** 2, axis=-1))
case("array_api_extra.lazy_apply", lambda x, c: xpx.lazy_apply(np.sin, x, as_numpy=True))
case("array_api_extra.nunique", lambda x, c: xpx.nunique(x) * x[0, 0])
case(
    "array_api_compat.to_device, device, size",
    lambda x, c: array_api_compat.to_device(x, array_api_compat.device(x)) * array_api_compat.size(x),
)
case("array_api_compat.is_array_api_obj", lambda x, c: x if array_api_compat.is_array_api_obj(x) else 1 / 0)
case("array_api_compat.array_namespace", lambda x, c: array_api_compat.array_namespace(x, c.b).exp(x))
for _prefix, _module in (("einops", einops), ("einops.array_api", einops.array_api)):
    each(_prefix, _module, "rearrange", lambda f, x, c: f(x, "a (b c) -> b a c", b=2))
    each(_prefix, _module, "reduce", lambda f, x, c: f(x, "(a k) b -> a b", "max", k=2))
    each(_prefix, _module, "repeat", lambda f, x, c: f(x, "a b -> a b c", c=2))
    each(_prefix, _module, "pack", lambda f, x, c: f([x, c.b], "* b")[0])
    case(f"{_prefix}.reduce to the mean", lambda x, c, f=_module.reduce: f(x, "a b -> a", "mean"))
case("einops.rearrange of a list", lambda x, c: einops.rearrange([x[0, ...], x[1, ...]], "l b -> b l"))
case("einops.einsum", lambda x, c: einops.einsum(x, c.b, "a b, a c -> b c"))
case("opt_einsum.contract", lambda x, c: opt_einsum.contract("ab,ac,cd->bd", x, c.b, c.s))
case(
    "opt_einsum.contract, a constant first",
    lambda x, c: opt_einsum.contract("ac,ab,cd->bd", c.b, x, c.s, backend="auto"),
)

# --- states ---------------------------------------------------------------------------------------------------------


def total(x: Any, constants: Any, function: Any) -> Any:
    """Return a weighted sum of the first result of a function."""
    xp = array_api_compat.array_namespace(x)
    y = function(x, SimpleNamespace(**constants, xp=xp))
    y = getattr(y, "statistic", y)
    y = y[0] if isinstance(y, tuple | list) else y
    y = xp.asarray(y)
    weights = xp.cos(xp.arange(float(np.prod(y.shape, dtype=int)), dtype=xp.float64))
    return xp.sum(y * xp.reshape(weights, tuple(y.shape)))


def state(name: str, library: str) -> str:
    """Return the state of a function on a library, and why it is not right."""
    if name in MISSING:
        return f"not applicable: {MISSING[name]}"
    function, x = CASES[name]
    xp, direction, step = resolve(library), np.random.default_rng(1).standard_normal(x.shape), 1e-6
    constants = {key: from_host(xp, value) for key, value in CONSTANTS.items()}
    try:
        ahead, behind = (float(total(from_host(xp, x + h * direction), constants, function)) for h in (step, -step))
    except Exception as error:  # noqa: BLE001
        return f"not applicable: {type(error).__name__} without a derivative"
    difference = (ahead - behind) / (2 * step)
    if not np.isfinite(difference):
        return "not applicable: its value is NaN or infinite"
    try:
        gradient = float(np.sum(to_host(xf.grad(total)(from_host(xp, x), constants, function)) * direction))
    except Exception as error:  # noqa: BLE001
        return f"refused: {why(error)}"
    if np.isnan(gradient):
        return "refused: NaN, since the function computes 0 / 0 and replaces it, as with autograd of torch"
    is_right = abs(gradient - difference) < 1e-5 * (1 + abs(difference))
    return "right" if is_right else f"wrong: {gradient} instead of {difference}"


def why(error: Exception) -> str:
    """Return the reason of an error in few words: what the library did with a traced array."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__) if "site-packages" in frame.filename]
    package = files[-1].split("site-packages/")[1].split("/")[0] if files else "xformer"
    for sign, use in {"another library": "np.asarray(x)", "float(x) of": "float(x)", "int(x) of": "int(x)"}.items():
        if sign in str(error):
            return f"{use} in {package}"
    kind = "" if isinstance(error, XformerError) else f"{type(error).__name__}: "
    return kind + str(error).splitlines()[0].split(";")[0].split(" (see")[0][:80]


def states(libraries: Sequence[str]) -> dict[str, Any]:
    """Return the versions of the packages, and the state of each function by library."""
    warnings.simplefilter("ignore")
    sklearn.set_config(array_api_dispatch=True)
    if "torch" in libraries:
        resolve("torch").set_default_dtype(resolve("torch").float64)
    with np.errstate(all="ignore"):
        functions = {name: {library: state(name, library) for library in libraries} for name in [*CASES, *MISSING]}
    return {"versions": {name: importlib.metadata.version(name) for name in PACKAGES}, "functions": functions}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries", nargs="*", default=["numpy", "torch", "array_api_strict"])
    parser.add_argument("--out", default="docs/libraries/derivatives.json")
    arguments = parser.parse_args()
    pathlib.Path(arguments.out).write_text(json.dumps(states(arguments.libraries), indent=1) + "\n", encoding="utf-8")
