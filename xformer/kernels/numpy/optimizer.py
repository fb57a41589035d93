"""The optimizer's arithmetic on NumPy, in place and in blocks that stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.kernels.numpy.arrays import supports_floats
from xformer.kernels.registry import Kernel, register
from xformer.ops.adam import Settings, Slot, slots, updated, writable

_BLOCK = 32768  # elements: five arrays of this size stay in a core's second-level cache


def supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Return None if the arrays can be updated in place, element by element, else the reason why not."""
    for parameter, _, exp_avg, exp_avg_sq in slots(arrays[1:]):
        in_place = parameter, exp_avg, exp_avg_sq
        if not all(array.flags.writeable for array in in_place):
            return "an array is read-only"
        if not any(all(array.flags[order] for array in in_place) for order in ("C_CONTIGUOUS", "F_CONTIGUOUS")):
            return "arrays are not contiguous, or differ in memory order"
    return supports_floats(arrays[1:], static)


def elements(slot: Slot) -> list[Any]:
    """Flatten the arrays of a slot, in the memory order of the parameter."""
    parameter, gradient, exp_avg, exp_avg_sq = slot
    order: Any = "C" if parameter.flags.c_contiguous else "F"
    if not gradient.flags[f"{order}_CONTIGUOUS"]:
        gradient = gradient.copy(order)
    return [array.reshape(-1, order="A") for array in (parameter, gradient, exp_avg, exp_avg_sq)]


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
        flat, decay = elements(slot), settings.decay(rate)
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


register(Kernel("numpy.adam", "adam", "numpy", supports, _forward, None))


def _squared_norm_forward(*arrays: Any, save: bool) -> tuple[Any, Any]:
    flat = (x.reshape(-1, order="A") for x in arrays)
    return np.asarray(sum(float(np.vdot(x, x)) for x in flat), arrays[0].dtype), arrays


def _squared_norm_vjp(g: Any, arrays: Any, needs: Any) -> tuple[Any, ...]:
    return tuple(x * (2.0 * g) for x in arrays)


register(
    Kernel("numpy.squared_norm", "squared_norm", "numpy", supports_floats, _squared_norm_forward, _squared_norm_vjp)
)
