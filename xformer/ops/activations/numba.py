"""Activation functions on NumPy, compiled by numba."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numba.types import float32

from xformer.backends.recording import empty
from xformer.ops._numba.compile import EMPTY_1D, compiled_kernel, flatten, in_array, kernel, out_array
from xformer.ops._numba.vector_math import ONE, ZERO, exp
from xformer.ops.activations.definition import CUBIC, SCALE
from xformer.ops.activations.numpy import COEFFICIENTS, P, vjp

_f32 = np.float32  # a Python number would turn a computation into float64


@kernel(in_array(1), in_array(1), float32, out_array(1), out_array(1))
def gelu_kernel(x, coefficients, p, y, slope):
    """Compute GELU as activations/numpy.py does, and its derivative unless `slope` is empty."""
    c0, c1, c2, c3 = coefficients[0], coefficients[1], coefficients[2], coefficients[3]
    c4, c5, c6, c7 = coefficients[4], coefficients[5], coefficients[6], coefficients[7]
    max_abs, half, density = _f32(30.0), _f32(-0.5), _f32(1.0 / math.sqrt(2.0 * math.pi))
    save = slope.size > 0
    for i in range(x.size):
        a = abs(x[i])
        a = max_abs if a > max_abs else a
        power = exp(half * a * a)
        t = ONE / (ONE + p * a)
        s = (((((((c7 * t + c6) * t + c5) * t + c4) * t + c3) * t + c2) * t + c1) * t + c0) * t * power
        y[i] = (x[i] if x[i] > ZERO else ZERO) - a * s
        if save:
            s -= density * a * power
            slope[i] = s if x[i] < ZERO else ONE - s


@kernel(in_array(1), float32, float32, out_array(1), out_array(1))
def logistic_unit_kernel(x, scale, cubic, y, slope):
    """Compute y = x s(scale (x + cubic x^3)), s the logistic function, and its derivative unless `slope` is empty."""
    limit, three, save = _f32(80.0), _f32(3.0), slope.size > 0
    for i in range(x.size):
        low = -limit if x[i] < -limit else x[i]  # minus infinity times zero would be NaN
        clipped = limit if low > limit else low
        square = clipped * clipped
        z = scale * clipped * (ONE + cubic * square)
        a = abs(z)
        e = exp(-(limit if a > limit else a))
        s = (ONE if z > ZERO else e) / (ONE + e)
        y[i] = low * s
        if save:
            slope[i] = s + clipped * s * (ONE - s) * scale * (ONE + three * cubic * square)


@kernel(in_array(1), out_array(1))
def relu_kernel(x, y):
    """Compute y = max(x, 0), which propagates NaN."""
    for i in range(x.size):
        y[i] = ZERO if x[i] < ZERO else x[i]


@kernel(in_array(1), in_array(1), out_array(1))
def relu_vjp_kernel(g, y, dx):
    """Compute dx = g where y > 0, else 0."""
    for i in range(g.size):
        dx[i] = g[i] if y[i] > ZERO else ZERO


_COEFFICIENTS = np.asarray(COEFFICIENTS, np.float32)


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    slope = np.empty_like(y) if save else EMPTY_1D
    gelu_kernel(flatten(x), _COEFFICIENTS, P, y.reshape(-1), slope.reshape(-1))
    return y, slope


def _logistic_unit_forward(x: Any, *, save: bool, scale: float, cubic: float) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    slope = np.empty_like(y) if save else EMPTY_1D
    logistic_unit_kernel(flatten(x), scale, cubic, y.reshape(-1), slope.reshape(-1))
    return y, slope


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = empty(x.shape, x.dtype)
    relu_kernel(flatten(x), y.reshape(-1))
    return y, y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    dx = empty(g.shape, g.dtype)
    relu_vjp_kernel(flatten(g), flatten(y), dx.reshape(-1))
    return (dx,)


KERNELS = [
    compiled_kernel("gelu", _gelu_forward, vjp),
    compiled_kernel("gelu_tanh", partial(_logistic_unit_forward, scale=SCALE, cubic=CUBIC), vjp),
    compiled_kernel("silu", partial(_logistic_unit_forward, scale=1.0, cubic=0.0), vjp),
    compiled_kernel("relu", _relu_forward, _relu_vjp),
]
