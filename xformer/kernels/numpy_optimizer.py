"""The optimizer's arithmetic on NumPy, in place and in blocks that stay in the cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.kernels.numpy_support import floats
from xformer.kernels.registry import Kernel, register

_BLOCK = 32768  # elements: five arrays of this size stay in a core's second-level cache


def supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """None for arrays that can be updated in place, element by element, else the reason why not."""
    parameter, _, first, second = arrays
    if not all(array.flags.writeable for array in (parameter, first, second)):
        return "an array is read-only"
    for order in ("C", "F"):
        if all(array.flags[f"{order}_CONTIGUOUS"] for array in arrays):
            return floats(arrays, static)
    return "arrays are not contiguous, or differ in memory order"


def _forward(
    parameter: Any,
    gradient: Any,
    first: Any,
    second: Any,
    *,
    step_size: float,
    beta1: float,
    beta2: float,
    second_scale: float,
    epsilon: float,
    keep: float,
    save: bool,
) -> tuple[Any, Any]:
    """The scale s of the second moment leaves the root: a m / (sqrt(s v) + e) = a/sqrt(s) m / (sqrt(v) + e/sqrt(s))."""
    flat = [array.reshape(-1, order="A") for array in (parameter, gradient, first, second)]
    root = math.sqrt(second_scale)
    work = np.empty(min(_BLOCK, parameter.size), dtype=parameter.dtype)
    for start in range(0, parameter.size, _BLOCK):
        p, g, m, v = (array[start : start + _BLOCK] for array in flat)
        t = work[: p.size]
        np.multiply(g, 1.0 - beta1, out=t)
        m *= beta1
        m += t
        t *= g
        t *= (1.0 - beta2) / (1.0 - beta1)
        v *= beta2
        v += t
        np.sqrt(v, out=t)
        t += epsilon / root
        np.divide(m, t, out=t)
        t *= step_size / root
        if keep != 1.0:
            p *= keep
        p -= t
    return (parameter, first, second), None


register(Kernel("numpy.adam", "adam", "numpy", supports, _forward, None))


def _squared_norm_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    flat = x.reshape(-1, order="A")
    return np.vdot(flat, flat), x


def _squared_norm_vjp(g: Any, x: Any, needs: Any) -> tuple[Any, ...]:
    return (x * (2.0 * g),)


register(Kernel("numpy.squared_norm", "squared_norm", "numpy", floats, _squared_norm_forward, _squared_norm_vjp))
