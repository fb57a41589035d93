"""GELU on NumPy, which has no erf: one exponential and a polynomial give the function and its derivative together.

With a = |x| and Phi(-a) the tail of the normal distribution, gelu(x) = max(x, 0) - a Phi(-a). The tail is
exp(-a^2 / 2) times a function that a polynomial in 1 / (1 + p a) fits (the form of Hastings, 1955, that Abramowitz and
Stegun have as 7.1.26), here to float32's precision everywhere, however small the tail.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.kernels.registry import Kernel, register

# Fitted for the least relative error over 0 <= a <= 14, which is 9.4e-8: beyond, float32 has no such tail.
P = 0.305
COEFFICIENTS = (
    0.121639735328, 0.1224667746, 0.103421139712, 0.121020745167,
    -0.037975001979, 0.185714847352, -0.152987076117, 0.03669888286,
)  # fmt: skip
_FARTHEST = 30.0  # the tail is zero by then; infinity times zero would be NaN
_BLOCK = 32 * 1024  # elements: what a block needs stays in the cache through all passes
_SIGN = np.uint32(0x80000000)
# Comparing with an array is three times faster than with a number.
_ZEROS, _LIMITS = np.zeros(_BLOCK, np.float32), np.full(_BLOCK, _FARTHEST, np.float32)


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if arrays[0].dtype != np.float32:
        return f"dtype {arrays[0].dtype} (the polynomial has the precision of float32)"
    return None


def _tail(a: Any, power: Any, work: Any, out: Any) -> Any:
    """Phi(-a), given exp(-a^2 / 2)."""
    t = np.multiply(a, P, out=work)
    t += 1.0
    np.divide(1.0, t, out=t)
    np.multiply(t, COEFFICIENTS[-1], out=out)
    for coefficient in COEFFICIENTS[-2::-1]:
        out += coefficient
        out *= t
    out *= power
    return out


def _forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    """Keep the slope, Phi(x) + x phi(x): what is below zero of it is s = Phi(-a) - a phi(a), the rest 1 - s."""
    flat = x.reshape(-1)
    y, slope = np.empty_like(flat), np.empty_like(flat) if save else None
    buffers = np.empty((4, min(_BLOCK, flat.size)), flat.dtype)
    for start in range(0, flat.size, _BLOCK):
        part = slice(start, min(start + _BLOCK, flat.size))
        here, y_part = flat[part], y[part]
        a, power, work, tail = buffers[:, : here.size]
        np.abs(here, out=a)
        np.minimum(a, _LIMITS[: here.size], out=a)
        np.multiply(a, a, out=power)
        power *= -0.5
        np.exp(power, out=power)
        tail = _tail(a, power, work, tail)
        np.multiply(a, tail, out=work)
        np.maximum(here, _ZEROS[: here.size], out=y_part)
        y_part -= work
        if slope is None:
            continue
        power *= 1.0 / math.sqrt(2.0 * math.pi)
        power *= a
        tail -= power
        # 0.5 - s is never below zero, so x's sign can be put on it: s or 1 - s without a choice.
        s = np.subtract(0.5, tail, out=slope[part])
        bits = s.view(np.uint32)
        bits |= here.view(np.uint32) & _SIGN
        s += 0.5
    return y.reshape(x.shape), slope


def vjp(g: Any, slope: Any, needs: Any) -> tuple[Any, ...]:
    """The slope becomes the cotangent."""
    slope = slope.reshape(g.shape)
    return (np.multiply(slope, g, out=slope),)


register(Kernel("numpy.gelu", "gelu", "numpy", _supports, _forward, vjp))
