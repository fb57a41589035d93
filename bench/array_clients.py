"""Compare `xf.grad` through functions of SciPy, scikit-learn and others with central differences.

`python bench/array_clients.py [LIBRARIES [NAME]]`, such as `numpy,torch special.`, prints one line for each function.
It needs scipy, scikit-learn, array-api-extra, einops and opt_einsum.
"""

import os
import sys
import traceback
import warnings

os.environ["SCIPY_ARRAY_API"] = "1"
warnings.simplefilter("ignore")
import numpy as np
import scipy
import scipy.cluster
import scipy.datasets
import scipy.differentiate as sd
import scipy.fft as sf
import scipy.integrate as si
import scipy.interpolate as sip
import scipy.linalg as sl
import scipy.ndimage as nd
import scipy.optimize as so
import scipy.signal as sg
import scipy.spatial
import scipy.spatial.transform as tr
import scipy.special as sp
import scipy.stats as st
import sklearn

sklearn.set_config(array_api_dispatch=True)
import array_api_compat as aac
import array_api_extra as xpx
import einops
import opt_einsum
import sklearn.metrics as sm
import sklearn.metrics.pairwise as smp
import sklearn.preprocessing as spp
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.mixture import GaussianMixture
from sklearn.naive_bayes import GaussianNB

import xformer as xf
from xformer.backends import from_host, resolve, to_host

R = np.random.default_rng(0)
A = R.random((6, 4)) + 0.1
B = R.random((6, 4)) + 0.1
S = R.random((4, 4)) + 4 * np.eye(4)
SPD = S @ S.T
V = R.random(8) + 0.2
F = {}


def f(name, x0=A):
    def d(fn):
        F[name] = (fn, x0)
        return fn

    return d


other = {}


def O(xp, a):
    return from_host(xp, np.asarray(a))


# special
for n in ("logsumexp", "softmax", "log_softmax"):
    f("special." + n)(lambda x, xp, n=n: getattr(sp, n)(x, axis=-1))
for n in (
    "expit",
    "logit",
    "erf",
    "erfc",
    "entr",
    "gammaln",
    "i0",
    "i1",
    "i0e",
    "log_ndtr",
    "ndtr",
    "ndtri",
    "sinc",
    "digamma",
):
    if hasattr(sp, n):
        f("special." + n, A * 0.8)(lambda x, xp, n=n: getattr(sp, n)(x))
f("special.xlogy")(lambda x, xp: sp.xlogy(x, O(xp, B)))
f("special.rel_entr")(lambda x, xp: sp.rel_entr(x, O(xp, B)))
f("special.kl_div")(lambda x, xp: sp.kl_div(x, O(xp, B)))
f("special.betaln")(lambda x, xp: sp.betaln(x, O(xp, B)) if hasattr(sp, "betaln") else None)
f("special.huber")(lambda x, xp: sp.huber(0.5, x))
f("special.logsumexp(b)")(lambda x, xp: sp.logsumexp(x, axis=0, b=O(xp, B)))
# stats
for n in (
    "zscore",
    "skew",
    "kurtosis",
    "variation",
    "gmean",
    "hmean",
    "circmean",
    "circvar",
    "circstd",
    "sem",
    "gstd",
    "tmean",
    "tvar",
    "tstd",
    "tmin",
    "tmax",
    "tsem",
    "iqr",
    "median_abs_deviation",
    "entropy",
    "differential_entropy",
    "expectile",
    "mode",
    "moment",
    "kstat",
    "kstatvar",
    "lmoment",
    "sigmaclip",
    "boxcox_llf",
    "yeojohnson_llf",
    "jarque_bera",
    "normaltest",
    "skewtest",
    "kurtosistest",
    "zmap",
    "bayes_mvs",
):
    if hasattr(st, n):
        f("stats." + n, A if n not in ("boxcox_llf",) else A)(
            lambda x, xp, n=n: (
                getattr(st, n)(1.0, x[:, 0])
                if n in ("boxcox_llf", "yeojohnson_llf")
                else getattr(st, n)(x, O(xp, B))
                if n == "zmap"
                else getattr(st, n)(x[:, 0])
                if n in ("kstat", "kstatvar", "sigmaclip")
                else getattr(st, n)(x)
            )
        )
f("stats.pmean")(lambda x, xp: st.pmean(x, 2.5))
f("stats.quantile")(lambda x, xp: st.quantile(x, 0.3))
f("stats.trim_mean")(lambda x, xp: st.trim_mean(x, 0.1))
f("stats.describe")(lambda x, xp: st.describe(x).variance)
f("stats.pearsonr")(lambda x, xp: st.pearsonr(x, O(xp, B)).statistic)
f("stats.spearmanr")(lambda x, xp: st.spearmanr(x).statistic)
f("stats.linregress")(lambda x, xp: st.linregress(x[:, 0], O(xp, B[:, 0])).slope)
f("stats.siegelslopes")(lambda x, xp: st.siegelslopes(x[:, 0], O(xp, B[:, 0])).slope)
f("stats.theilslopes")(lambda x, xp: st.theilslopes(x[:, 0], O(xp, B[:, 0])).slope)
f("stats.ttest_ind statistic")(lambda x, xp: st.ttest_ind(x, O(xp, B)).statistic)
f("stats.ttest_1samp statistic")(lambda x, xp: st.ttest_1samp(x, 0.1).statistic)
f("stats.ttest_rel")(lambda x, xp: st.ttest_rel(x, O(xp, B)).statistic)
f("stats.f_oneway")(lambda x, xp: st.f_oneway(x, O(xp, B)).statistic)
f("stats.bartlett")(lambda x, xp: st.bartlett(x, O(xp, B)).statistic)
f("stats.levene")(lambda x, xp: st.levene(x[:, 0], x[:, 1]).statistic)
f("stats.chisquare")(lambda x, xp: st.chisquare(x[:, 0], O(xp, B[:, 0]), sum_check=False).statistic)
f("stats.power_divergence")(lambda x, xp: st.power_divergence(x[:, 0], lambda_=1).statistic)
f("stats.Normal.logpdf")(lambda x, xp: st.Normal(mu=0.1, sigma=1.3).logpdf(x))
f("stats.norm.logpdf")(lambda x, xp: st.norm.logpdf(x))
f("stats.multivariate_normal.logpdf")(lambda x, xp: st.multivariate_normal(np.zeros(4)).logpdf(x))
f("stats.directional_stats")(lambda x, xp: st.directional_stats(x).mean_direction)
f("stats.rankdata(const)")(lambda x, xp: st.rankdata(x) * 1.0)
f("stats.cumfreq")(lambda x, xp: st.cumfreq(x[:, 0]).cumcount)
f("stats.winsorize")(lambda x, xp: st.mstats.winsorize(x))
# signal
f("signal.detrend const")(lambda x, xp: sg.detrend(x, axis=0, type="constant"))
f("signal.detrend linear")(lambda x, xp: sg.detrend(x, axis=0))
f("signal.convolve direct")(lambda x, xp: sg.convolve(x[:, 0], O(xp, V[:3]), method="direct"))
f("signal.fftconvolve")(lambda x, xp: sg.fftconvolve(x, O(xp, B), axes=0))
f("signal.oaconvolve")(lambda x, xp: sg.oaconvolve(x[:, 0], O(xp, V[:3])))
f("signal.hilbert")(lambda x, xp: xp_abs(sg.hilbert(x, axis=0)))
f("signal.lfilter")(lambda x, xp: sg.lfilter(O(xp, [1.0, 0.5]), O(xp, [1.0, 0.2]), x, axis=0))
f("signal.sosfilt")(lambda x, xp: sg.sosfilt(O(xp, np.array([[1, 0.5, 0, 1, 0.2, 0]])), x, axis=0))
f("signal.savgol_filter")(lambda x, xp: sg.savgol_filter(x, 5, 2, axis=0))
f("signal.welch")(lambda x, xp: sg.welch(x[:, 0], nperseg=4)[1])
f("signal.periodogram")(lambda x, xp: sg.periodogram(x[:, 0])[1])
f("signal.freqz")(lambda x, xp: xp_abs(sg.freqz(x[:, 0], worN=8)[1]))
f("signal.normalize")(lambda x, xp: sg.normalize(x[:, 0], O(xp, [2.0, 1.0]))[0])
f("signal.medfilt2d")(lambda x, xp: sg.medfilt2d(x))
f("signal.resample")(lambda x, xp: sg.resample(x, 8, axis=0))
f("signal.square-envelope (envelope)")(lambda x, xp: sg.envelope(x, axis=0))
f("signal.sawtooth")(lambda x, xp: sg.sawtooth(x))
f("signal.chirp")(lambda x, xp: sg.chirp(x, 1.0, 1.0, 2.0))
f("signal.gausspulse")(lambda x, xp: sg.gausspulse(x))
f("signal.unit_impulse")(lambda x, xp: None)
f("signal.correlate")(lambda x, xp: sg.correlate(x[:, 0], O(xp, V[:3]), method="direct"))
f("signal.vectorstrength")(lambda x, xp: sg.vectorstrength(x[:, 0], 0.7)[0])
f("signal.bilinear")(lambda x, xp: sg.bilinear(x[:3, 0], x[:3, 1])[0])
f("signal.tf2sos?")(lambda x, xp: sg.zpk2tf(x[:2, 0], x[:3, 1], 1.0)[1])
f("signal.lp2hp")(lambda x, xp: sg.lp2hp(x[:3, 0], x[:3, 1])[0])


def xp_abs(z):
    return xf.array_namespace(z).abs(z)


# integrate, ndimage, fft, linalg
f("integrate.trapezoid")(lambda x, xp: si.trapezoid(x**2, dx=0.1))
f("integrate.cumulative_trapezoid")(lambda x, xp: si.cumulative_trapezoid(x, dx=0.1))
f("integrate.simpson")(lambda x, xp: si.simpson(x, dx=0.1))
f("integrate.cumulative_simpson")(lambda x, xp: si.cumulative_simpson(x, dx=0.1))
f("integrate.romb", R.random((5, 5)))(lambda x, xp: si.romb(x))
f("integrate.tanhsinh param")(
    lambda x, xp: si.tanhsinh(lambda t: t * x[0, 0], xp.asarray(0.0), xp.asarray(1.0)).integral
)
f("integrate.cubature param")(
    lambda x, xp: si.cubature(lambda t: t[:, 0] * x[0, 0], O(xp, [0.0]), O(xp, [1.0])).estimate
)
f("integrate.fixed_quad")(lambda x, xp: si.fixed_quad(lambda t: x[0, 0] * t, 0.0, 1.0)[0])
f("ndimage.gaussian_filter")(lambda x, xp: nd.gaussian_filter(x, 1.0))
f("fft.fft")(lambda x, xp: xp_abs(sf.fft(x)))
f("fft.dct")(lambda x, xp: sf.dct(x))
f("linalg.norm")(lambda x, xp: sl.norm(x))
f("linalg.expm", S / 8)(lambda x, xp: sl.expm(x))
f("linalg.det", S)(lambda x, xp: sl.det(x))
f("linalg.solve", S)(lambda x, xp: sl.solve(x, O(xp, V[:4])))
f("np.linalg-like xp.linalg.vector_norm")(lambda x, xp: xf.array_namespace(x).linalg.vector_norm(x))
f("xp.linalg.matmul?")(lambda x, xp: xf.array_namespace(x).linalg.matmul(x, O(xp, A.T)))
f("xp.linalg.cross", A[:, :3])(lambda x, xp: xf.array_namespace(x).linalg.cross(x, O(xp, B[:, :3])))
f("xp.linalg.outer", V)(lambda x, xp: xf.array_namespace(x).linalg.outer(x, O(xp, V)))
f("xp.linalg.trace", S)(lambda x, xp: xf.array_namespace(x).linalg.trace(x))
f("xp.linalg.diagonal", S)(lambda x, xp: xf.array_namespace(x).linalg.diagonal(x))
f("xp.linalg.inv", S)(lambda x, xp: xf.array_namespace(x).linalg.inv(x))
f("xp.linalg.cholesky", SPD)(lambda x, xp: xf.array_namespace(x).linalg.cholesky(x))
f("xp.linalg.slogdet", S)(lambda x, xp: xf.array_namespace(x).linalg.slogdet(x)[1])
f("xp.fft.rfft")(lambda x, xp: xp_abs(xf.array_namespace(x).fft.rfft(x)))
# spatial, optimize, interpolate, cluster, differentiate
f("spatial.transform.Rotation.from_quat.apply", R.random(4))(
    lambda x, xp: tr.Rotation.from_quat(x).apply(O(xp, [1.0, 2.0, 3.0]))
)
f("spatial.transform.Rotation.from_rotvec.as_matrix", R.random(3))(lambda x, xp: tr.Rotation.from_rotvec(x).as_matrix())
f("spatial.distance.cdist")(lambda x, xp: scipy.spatial.distance.cdist(x, O(xp, B)))
f("optimize.rosen")(lambda x, xp: so.rosen(x[:, 0]))
f("optimize.rosen_der")(lambda x, xp: so.rosen_der(x[:, 0]))
f("optimize.rosen_hess")(lambda x, xp: so.rosen_hess(x[:, 0]))
f("optimize.elementwise.find_root param")(
    lambda x, xp: so.elementwise.find_root(lambda t: t**2 - x[0, 0], (xp.asarray(0.0), xp.asarray(3.0))).x
)
f("cluster.whiten")(lambda x, xp: scipy.cluster.vq.whiten(x))
f("cluster.vq")(lambda x, xp: scipy.cluster.vq.vq(x, O(xp, B[:2]))[1])
f("differentiate.derivative")(lambda x, xp: sd.derivative(lambda t: t**3 * 1.0, x[0, :2]).df)
f("interpolate.AAA", V)(lambda x, xp: sip.BarycentricInterpolator(x)(0.3))
f("interpolate.RBF", A)(lambda x, xp: sip.RBFInterpolator(O(xp, B), x[:, 0])(O(xp, B[:2])))
f("interpolate.make_interp_spline", V)(
    lambda x, xp: sip.make_interp_spline(O(xp, np.arange(8.0)), x)(O(xp, [0.5, 1.5]))
)
f("interpolate.CubicSpline", V)(lambda x, xp: sip.CubicSpline(O(xp, np.arange(8.0)), x)(O(xp, [0.5, 1.5])))
f("interpolate.PchipInterpolator", V)(lambda x, xp: sip.PchipInterpolator(O(xp, np.arange(8.0)), x)(O(xp, [0.5, 1.5])))
f("interpolate.Akima", V)(lambda x, xp: sip.Akima1DInterpolator(O(xp, np.arange(8.0)), x)(O(xp, [0.5, 1.5])))
# sklearn
for n in ("MinMaxScaler", "MaxAbsScaler", "StandardScaler", "Normalizer", "PolynomialFeatures", "KernelCenterer"):
    f("sklearn." + n, A if n != "KernelCenterer" else SPD)(lambda x, xp, n=n: getattr(spp, n)().fit_transform(x) ** 2)
for n in (
    "euclidean_distances",
    "rbf_kernel",
    "cosine_similarity",
    "linear_kernel",
    "polynomial_kernel",
    "sigmoid_kernel",
    "laplacian_kernel",
    "chi2_kernel",
    "additive_chi2_kernel",
    "cosine_distances",
    "paired_euclidean_distances",
    "paired_cosine_distances",
    "manhattan_distances",
):
    f("sklearn." + n)(lambda x, xp, n=n: getattr(smp, n)(x, O(xp, B)))
f("sklearn.pairwise_distances")(lambda x, xp: sm.pairwise_distances(x, O(xp, B)))
for n in (
    "mean_squared_error",
    "mean_absolute_error",
    "r2_score",
    "mean_tweedie_deviance",
    "mean_poisson_deviance",
    "mean_gamma_deviance",
    "explained_variance_score",
    "mean_pinball_loss",
    "max_error",
    "d2_absolute_error_score",
    "root_mean_squared_error",
    "mean_squared_log_error",
    "log_loss",
    "brier_score_loss",
):
    f("sklearn." + n)(
        lambda x, xp, n=n: (
            getattr(sm, n)(O(xp, B[:, 0]), x[:, 0])
            if n not in ("log_loss", "brier_score_loss")
            else getattr(sm, n)(O(xp, np.array([0, 1, 0, 1, 1, 0])), x[:, 0] * 0.5)
        )
    )
f("sklearn.PCA.fit_transform")(lambda x, xp: PCA(2, svd_solver="covariance_eigh").fit_transform(x) ** 2)
f("sklearn.Ridge coef")(lambda x, xp: Ridge(solver="svd").fit(x, O(xp, B[:, 0])).coef_)
f("sklearn.Ridge wrt y")(lambda x, xp: Ridge(solver="svd").fit(O(xp, B), x[:, 0]).coef_)
f("sklearn.LinearRegression")(lambda x, xp: LinearRegression().fit(x, O(xp, B[:, 0])).coef_)
f("sklearn.LDA")(
    lambda x, xp: LinearDiscriminantAnalysis().fit(x, O(xp, np.array([0, 0, 0, 1, 1, 1]))).decision_function(x)
)
f("sklearn.GaussianMixture.score (fitted)")(lambda x, xp: GaussianMixture(1).fit(O(xp, B)).score_samples(x))
f("sklearn.GaussianNB predict_log_proba (fitted)")(
    lambda x, xp: GaussianNB().fit(O(xp, B), O(xp, np.array([0, 0, 0, 1, 1, 1]))).predict_log_proba(x)
)
f("sklearn.Nystroem")(lambda x, xp: Nystroem(n_components=3, random_state=0).fit(O(xp, B)).transform(x))
f("sklearn.Ridge.predict(fitted)")(lambda x, xp: Ridge(solver="svd").fit(O(xp, B), O(xp, B[:, 0])).predict(x))
f("sklearn.PCA.transform (fitted)")(lambda x, xp: PCA(2, svd_solver="full").fit(O(xp, B)).transform(x))
f("sklearn.StandardScaler.transform (fitted)")(lambda x, xp: spp.StandardScaler().fit(O(xp, B)).transform(x) ** 2)
# array-api-extra
f("xpx.cov")(lambda x, xp: xpx.cov(x))
f("xpx.atleast_nd")(lambda x, xp: xpx.atleast_nd(x, ndim=3))
f("xpx.kron", S)(lambda x, xp: xpx.kron(x, O(xp, S)))
f("xpx.sinc")(lambda x, xp: xpx.sinc(x))
f("xpx.pad")(lambda x, xp: xpx.pad(x, 2))
f("xpx.expand_dims")(lambda x, xp: xpx.expand_dims(x, axis=(0, 2)))
f("xpx.apply_where")(lambda x, xp: xpx.apply_where(x > 0.5, x, lambda t: t**2, lambda t: -t))
f("xpx.at.set")(lambda x, xp: xpx.at(x, (slice(0, 2),)).multiply(3.0))
f("xpx.at.add")(lambda x, xp: xpx.at(x)[0, 1].add(3.0) * x)
f("xpx.at.set copy")(lambda x, xp: xpx.at(x)[x > 0.5].set(0.0, copy=True))
f("xpx.nan_to_num")(lambda x, xp: xpx.nan_to_num(x))
f("xpx.one_hot(const)")(lambda x, xp: xpx.one_hot(xp.asarray([0, 1]), 3) * x[0, 0])
f("xpx.create_diagonal", V)(lambda x, xp: xpx.create_diagonal(x))
f("xpx.softmax?")(lambda x, xp: xpx.softmax(x) if hasattr(xpx, "softmax") else None)
f("xpx.isclose(const)")(lambda x, xp: x * xpx.isclose(x, x))
f("xpx.default_dtype")(lambda x, xp: x * (xpx.default_dtype(xf.array_namespace(x)) is not None))
f("xpx.partition")(lambda x, xp: xf.array_namespace(x).sum(xpx.partition(x, 2)[..., :2] ** 2, axis=-1))
f("xpx.quantile")(lambda x, xp: xpx.quantile(x, O(xp, [0.3, 0.6])) if hasattr(xpx, "quantile") else None)
f("xpx.median")(lambda x, xp: xpx.median(x) if hasattr(xpx, "median") else None)
f("xpx.angle/unravel")(lambda x, xp: xpx.angle(x) if hasattr(xpx, "angle") else None)
f("xpx.lazy_apply")(lambda x, xp: xpx.lazy_apply(np.sin, x, as_numpy=True))
f("xpx.nunique")(lambda x, xp: xpx.nunique(x) * x[0, 0])
f("xpx.setdiff1d")(lambda x, xp: xpx.setdiff1d(x[:, 0], O(xp, B[:, 0])))
# array-api-compat helpers
f("aac.array_namespace/size/device/to_device")(lambda x, xp: aac.to_device(x, aac.device(x)) * aac.size(x))
f("aac.is_array_api_obj")(lambda x, xp: x * float(aac.is_array_api_obj(x)))
f("aac.is_array_api_obj is True")(lambda x, xp: x if aac.is_array_api_obj(x) else 1 / 0)
# einops, opt_einsum
f("einops.rearrange")(lambda x, xp: einops.rearrange(x, "a (b c) -> b a c", b=2))
f("einops.reduce mean")(lambda x, xp: einops.reduce(x, "a b -> a", "mean"))
f("einops.repeat")(lambda x, xp: einops.repeat(x, "a b -> a b 2"))
f("einops.einsum")(lambda x, xp: einops.einsum(x, O(xp, B), "a b, a c -> b c"))
f("einops.pack")(lambda x, xp: einops.pack([x, x], "* b")[0])
f("einops.asnumpy?")(lambda x, xp: einops.rearrange([x[0], x[1]], "l b -> b l"))
import einops.array_api as ea

f("einops.array_api.rearrange")(lambda x, xp: ea.rearrange(x, "a (b c) -> b a c", b=2))
f("einops.array_api.reduce mean")(lambda x, xp: ea.reduce(x, "a b -> a", "mean"))
f("einops.array_api.reduce max")(lambda x, xp: ea.reduce(x, "(a k) b -> a b", "max", k=2))
f("einops.array_api.repeat")(lambda x, xp: ea.repeat(x, "a b -> a b c", c=2))
f("einops.array_api.pack")(lambda x, xp: ea.pack([x, x], "* b")[0])
f("opt_einsum.contract")(lambda x, xp: opt_einsum.contract("ab,ac,cd->bd", x, O(xp, B), O(xp, S)))
f("opt_einsum backend=xp ns")(lambda x, xp: opt_einsum.contract("ab,ac,cd->bd", x, O(xp, B), O(xp, S), backend="auto"))


def flat(xp_, y):
    if y is None:
        return None
    if isinstance(y, (tuple, list)) or hasattr(y, "_fields"):
        y = y[0]
    if hasattr(y, "statistic"):
        y = y.statistic
    if isinstance(y, (float, int, np.floating)):
        return y
    return y


def total(fn, x, xp):
    y = flat(xp, fn(x, xp))
    if y is None:
        raise NotImplementedError("n/a")
    if isinstance(y, (float, int)):
        return y
    ns = xf.array_namespace(y)
    w = from_host(xp, np.cos(np.arange(int(np.prod(y.shape)) or 1)).reshape(y.shape))
    return ns.sum(y * w)


libs = list(sys.argv[1].split(",") if len(sys.argv) > 1 else ["numpy", "torch", "array_api_strict"])
pat = sys.argv[2] if len(sys.argv) > 2 else ""
for name, (fn, x0) in F.items():
    if pat and pat not in name:
        continue
    line = []
    for lib in libs:
        xp = resolve(lib)
        d = R.standard_normal(x0.shape)
        try:
            with np.errstate(all="ignore"):
                plain = float(total(fn, from_host(xp, x0), xp))
        except NotImplementedError:
            line.append(f"{lib}: n/a")
            continue
        except Exception as e:
            line.append(f"{lib}: PLAIN FAILS {type(e).__name__} {str(e)[:60]!r}")
            continue
        try:
            h = 1e-6
            num = (
                float(total(fn, from_host(xp, x0 + h * d), xp)) - float(total(fn, from_host(xp, x0 - h * d), xp))
            ) / (2 * h)
        except Exception:
            num = float("nan")
        try:
            g = to_host(xf.grad(lambda x: total(fn, x, xp))(from_host(xp, x0)))
            a = float((g * d).sum())
            err = abs(a - num) / (1 + abs(num))
            line.append(
                f"{lib}: {'ok' if err < 1e-5 else 'WRONG'} {err:.0e}"
                + ("" if err < 1e-5 else f" (grad {a:.6g} fd {num:.6g})")
            )
        except Exception as e:
            tb = traceback.extract_tb(e.__traceback__)[-1]
            fr = [q for q in traceback.extract_tb(e.__traceback__) if "xformer" not in q.filename]
            q = fr[-1] if fr else tb
            line.append(
                f"{lib}: FAIL {type(e).__name__}: {str(e)[:150]!r} "
                f"at {q.filename.split('site-packages/')[-1]}:{q.lineno}"
            )
    print(f"{name:40} | " + " | ".join(line), flush=True)
