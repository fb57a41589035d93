"""The optimizer's arithmetic on NumPy, in place and in blocks that stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from xformer.kernels.numpy.arrays import supports_floats
from xformer.kernels.registry import Kernel, register
from xformer.ops.adam import Slot, slots, updated, writable

_BLOCK = 32768  # elements: five arrays of this size stay in a core's second-level cache


def supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """None for arrays that can be updated in place, element by element, else the reason why not."""
    for parameter, _, first, second in slots(arrays[1:]):
        if not (parameter.flags.writeable and first.flags.writeable and second.flags.writeable):
            return "an array is read-only"
        in_place = parameter, first, second
        if not any(all(array.flags[order] for array in in_place) for order in ("C_CONTIGUOUS", "F_CONTIGUOUS")):
            return "arrays are not contiguous, or differ in memory order"
    return supports_floats(arrays[1:], static)


def elements(slot: Slot) -> list[Any]:
    """Flatten the arrays of a slot, in the memory order of the parameter."""
    parameter, gradient, first, second = slot
    order: Any = "C" if parameter.flags.c_contiguous else "F"
    if not gradient.flags[f"{order}_CONTIGUOUS"]:
        gradient = gradient.copy(order)
    return [array.reshape(-1, order="A") for array in (parameter, gradient, first, second)]


def read(factor: Any) -> float | None:
    """Return the factor as a number (1 by default), or None if it is NaN, which skips the update."""
    number = 1.0 if factor is None else float(factor)
    return None if math.isnan(number) else number


def _forward(
    factor: Any,
    *arrays: Any,
    step_size: float,
    beta1: float,
    beta2: float,
    bias_correction2: float,
    epsilon: float,
    decay: Sequence[float],
    donate: bool,
    save: bool,
) -> tuple[Any, Any]:
    """Update with Adam, moving the scale of the second moment out of the root.

    a m / (sqrt(s v) + e) = a/sqrt(s) m / (sqrt(v) + e/sqrt(s))
    """
    arrays = tuple(writable(arrays, donate))
    root, number = math.sqrt(bias_correction2), read(factor)
    if number is None:
        return updated(arrays), None
    work = np.empty(min(_BLOCK, max(array.size for array in arrays)), arrays[0].dtype)
    for slot, kept in zip(slots(arrays), decay, strict=True):
        flat = elements(slot)
        for start in range(0, flat[0].size, _BLOCK):
            p, g, m, v = (array[start : start + _BLOCK] for array in flat)
            t = work[: p.size]
            np.multiply(g, number * (1.0 - beta1), out=t)
            m *= beta1
            m += t
            t *= g
            t *= number * (1.0 - beta2) / (1.0 - beta1)
            v *= beta2
            v += t
            np.sqrt(v, out=t)
            t += epsilon / root
            np.divide(m, t, out=t)
            t *= step_size / root
            if kept != 1.0:
                p *= kept
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
