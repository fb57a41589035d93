"""Adam on NumPy, in place and in blocks that stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.ops._numpy import FLOATS
from xformer.ops.adam.definition import Settings, slots, updated, writable
from xformer.ops.operation import Kernel

_BLOCK = 32768  # elements: five arrays of this size stay in a core's second-level cache


def why_not(grad_scale: Any, *arrays: Any, **options: Any) -> str | None:
    """Return why the arrays cannot be updated in place, element by element, or None."""
    for parameter, _, exp_avg, exp_avg_sq in slots(arrays):
        p, m, v = parameter.flags, exp_avg.flags, exp_avg_sq.flags
        if not (p.writeable and m.writeable and v.writeable):
            return "an array is read-only"
        if not (p.c_contiguous and m.c_contiguous and v.c_contiguous) and not (
            p.f_contiguous and m.f_contiguous and v.f_contiguous
        ):
            return "arrays are not contiguous, or differ in memory order"
    return None


def elements(parameter: Any, gradient: Any, exp_avg: Any, exp_avg_sq: Any) -> tuple[Any, Any, Any, Any]:
    """Flatten the arrays of a slot, in the memory order of the parameter."""
    order: Any = "C" if parameter.flags.c_contiguous else "F"
    if not gradient.flags[f"{order}_CONTIGUOUS"]:
        gradient = gradient.copy(order)
    return parameter.ravel("A"), gradient.ravel("A"), exp_avg.ravel("A"), exp_avg_sq.ravel("A")


def read_grad_scale(grad_scale: Any) -> float | None:
    """Return the scale of the gradients as a number (1 by default), or None if it is NaN, which skips the update."""
    scale = 1.0 if grad_scale is None else float(grad_scale)
    return None if math.isnan(scale) else scale


def _forward(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    """Update with Adam, moving the bias correction c of the second moment out of the root.

    a m / (sqrt(c v) + e) = a/sqrt(c) m / (sqrt(v) + e/sqrt(c))
    """
    arrays, settings = tuple(writable(arrays, donate)), Settings(*map(float, settings))
    step_size, beta1, beta2, bias_correction2, epsilon, _ = settings
    root, scale = math.sqrt(bias_correction2), read_grad_scale(grad_scale)
    if scale is None:
        return updated(arrays), None
    scratch = np.empty(min(_BLOCK, max(array.size for array in arrays)), arrays[0].dtype)
    for slot, rate in zip(slots(arrays), weight_decay, strict=True):
        flat, decay = elements(*slot), settings.decay(rate)
        for start in range(0, flat[0].size, _BLOCK):
            p, g, m, v = (array[start : start + _BLOCK] for array in flat)
            t = scratch[: p.size]
            np.multiply(g, scale * (1.0 - beta1), out=t)
            m *= beta1
            m += t
            t *= g
            t *= scale * (1.0 - beta2) / (1.0 - beta1)
            v *= beta2
            v += t
            np.sqrt(v, out=t)
            t += epsilon / root
            np.divide(m, t, out=t)
            t *= step_size / root
            if decay != 1.0:
                p *= decay
            p -= t
    return updated(arrays), None


KERNELS = [Kernel("numpy.adam", "adam", "numpy", _forward, None, dtypes=FLOATS, why_not=why_not)]
