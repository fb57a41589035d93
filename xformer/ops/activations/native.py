"""Activation functions on NumPy by the native library, with slopes for their derivatives.

An exponential and a polynomial give GELU and its derivative. With a = |x| and Phi(-a) the tail of the normal
distribution, gelu(x) = max(x, 0) - a Phi(-a). The tail is exp(-a^2 / 2) times a polynomial in t = 1 / (1 + p a)
(Hastings, 1955; Abramowitz and Stegun, 7.1.26), fitted to the relative precision of float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel
from xformer.ops.activations.definition import CUBIC, SCALE

# Fitted for the least relative error over 0 <= a <= 14, which is 9.4e-8; beyond, the tail is zero in float32.
_P = 0.305
_COEFFICIENTS = np.asarray(
    [
        0.121639735328, 0.1224667746, 0.103421139712, 0.121020745167,
        -0.037975001979, 0.185714847352, -0.152987076117, 0.03669888286,
    ],
    np.float32,
)  # fmt: skip


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype) if save else None
    native.call("gelu", (native.contiguous(x), _COEFFICIENTS, y, slope), n0=_P)
    return y, slope


def _logistic_unit_forward(x: Any, *, save: bool, scale: float, cubic: float) -> tuple[Any, Any]:
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype) if save else None
    native.call("logistic_unit", (native.contiguous(x), y, slope), n0=scale, n1=cubic)
    return y, slope


def _vjp(g: Any, slope: Any, needs: Any) -> tuple[Any, ...]:
    """Multiply the slope by g, in place."""
    native.call("multiply", (slope, g, slope))
    return (slope,)


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = np.empty(x.shape, x.dtype)
    native.call("relu", (native.contiguous(x), y))
    return y, y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    dx = np.empty(g.shape, g.dtype)
    native.call("relu_vjp", (native.contiguous(g), y, dx))
    return (dx,)


KERNELS = [
    native_kernel("gelu", _gelu_forward, _vjp),
    native_kernel("gelu_tanh", partial(_logistic_unit_forward, scale=SCALE, cubic=CUBIC), _vjp),
    native_kernel("silu", partial(_logistic_unit_forward, scale=1.0, cubic=0.0), _vjp),
    native_kernel("relu", _relu_forward, _relu_vjp),
]
