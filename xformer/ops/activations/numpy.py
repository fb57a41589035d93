"""ReLU and GELU on NumPy.

NumPy has no erf: an exponential and a polynomial give GELU and its derivative.
With a = |x| and Phi(-a) the tail of the normal distribution, gelu(x) = max(x, 0) - a Phi(-a). The tail is
exp(-a^2 / 2) times a polynomial in t = 1 / (1 + p a) (Hastings, 1955; Abramowitz and Stegun, 7.1.26), fitted to the
relative precision of float32.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.ops._numpy import FLOATS, masked
from xformer.ops.operation import Kernel

# Fitted for the least relative error over 0 <= a <= 14, which is 9.4e-8; beyond, the tail is zero in float32.
P = 0.305
COEFFICIENTS = (
    0.121639735328, 0.1224667746, 0.103421139712, 0.121020745167,
    -0.037975001979, 0.185714847352, -0.152987076117, 0.03669888286,
)  # fmt: skip
_MAX_ABS = 30.0  # the tail is zero there; infinity times zero would be NaN
_BLOCK = 32 * 1024  # elements; the buffers of a block stay in the cache through all passes
_SIGN = np.uint32(0x80000000)
# Comparing with an array is three times faster than with a number.
_ZEROS, _LIMITS = np.zeros(_BLOCK, np.float32), np.full(_BLOCK, _MAX_ABS, np.float32)


def _tail(a: Any, power: Any, scratch: Any, out: Any) -> Any:
    """Return Phi(-a), from a and exp(-a^2 / 2)."""
    t = np.multiply(a, P, out=scratch)
    t += 1.0
    np.divide(1.0, t, out=t)
    np.multiply(t, COEFFICIENTS[-1], out=out)
    for coefficient in COEFFICIENTS[-2::-1]:
        out += coefficient
        out *= t
    out *= power
    return out


def _forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    """Save the slope Phi(x) + x phi(x), which is s = Phi(-a) - a phi(a) for negative x and 1 - s for positive x."""
    flat = x.reshape(-1)
    y, slope = np.empty_like(flat), np.empty_like(flat) if save else None
    buffers = np.empty((4, min(_BLOCK, flat.size)), flat.dtype)
    for start in range(0, flat.size, _BLOCK):
        block = slice(start, min(start + _BLOCK, flat.size))
        x_block, y_block = flat[block], y[block]
        a, power, scratch, tail = buffers[:, : x_block.size]
        np.abs(x_block, out=a)
        np.minimum(a, _LIMITS[: x_block.size], out=a)
        np.multiply(a, a, out=power)
        power *= -0.5
        np.exp(power, out=power)
        tail = _tail(a, power, scratch, tail)
        np.multiply(a, tail, out=scratch)
        np.maximum(x_block, _ZEROS[: x_block.size], out=y_block)
        y_block -= scratch
        if slope is None:
            continue
        power *= 1.0 / math.sqrt(2.0 * math.pi)
        power *= a
        tail -= power
        # 0.5 - s is not negative, so copying the sign of x to it and adding 0.5 gives s or 1 - s.
        s = np.subtract(0.5, tail, out=slope[block])
        bits = s.view(np.uint32)
        bits |= x_block.view(np.uint32) & _SIGN
        s += 0.5
    return y.reshape(x.shape), slope


def vjp(g: Any, slope: Any, needs: Any) -> tuple[Any, ...]:
    """Multiply the slope by g, in place."""
    slope = slope.reshape(g.shape)
    return (np.multiply(slope, g, out=slope),)


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = np.maximum(x, 0.0)
    return y, y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    return (masked(y > 0, g),)


KERNELS = [
    Kernel("numpy.gelu", "gelu", "numpy", _forward, vjp, dtypes=("float32",)),
    Kernel("numpy.relu", "relu", "numpy", _relu_forward, _relu_vjp, dtypes=FLOATS),
]
