"""Differentiate functions of SciPy and scikit-learn that follow the standard."""

import importlib.util
import os

os.environ["SCIPY_ARRAY_API"] = "1"  # before SciPy is imported
import numpy as np
import scipy.integrate
import scipy.optimize
import scipy.special
import scipy.stats
import sklearn
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.preprocessing import MinMaxScaler

import xformer as xf
from xformer.backends import from_host, resolve, to_host

FUNCTIONS = {
    "scipy.special.logsumexp": lambda x: scipy.special.logsumexp(x, axis=-1),
    "scipy.stats.gmean": scipy.stats.gmean,
    "scipy.stats.skew": scipy.stats.skew,
    "scipy.integrate.trapezoid": lambda x: scipy.integrate.trapezoid(x**2, dx=0.1),
    "sklearn.preprocessing.MinMaxScaler": lambda x: (
        MinMaxScaler().fit_transform(x) ** 2
    ),
    "sklearn.metrics.pairwise.rbf_kernel": rbf_kernel,
}
LIBRARIES = [
    name
    for name in ("numpy", "torch", "array_api_strict")
    if importlib.util.find_spec(name)
]
data, direction = np.random.default_rng(0).random((2, 6, 4)) + 0.1
sklearn.set_config(array_api_dispatch=True)


def total(x, function):
    y = function(x)
    return xf.array_namespace(y).sum(y)


for name, function in FUNCTIONS.items():
    for library in LIBRARIES:
        if library == "array_api_strict" and function is rbf_kernel:
            continue  # which indexes as the standard does not allow
        xp = resolve(library)
        gradient = to_host(xf.grad(total)(from_host(xp, data), function))
        ahead, behind = (
            float(total(from_host(xp, data + h * direction), function))
            for h in (1e-6, -1e-6)
        )
        difference = abs((gradient * direction).sum() - (ahead - behind) / 2e-6)
        print(f"{name:36} {library:17} {difference:.0e} from the difference quotient")
        assert difference < 1e-6

# The other way round: an optimizer of SciPy takes the gradients.
bowl = xf.value_and_grad(
    lambda x: xf.array_namespace(x).sum((x - 1) ** 2 * (x + 2) ** 4)
)
print(scipy.optimize.minimize(bowl, np.full(3, 0.5), jac=True).x)
