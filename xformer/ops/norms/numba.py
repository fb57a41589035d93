"""Layer norm and RMS norm on NumPy, compiled by numba."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numba.types import boolean, float32

from xformer.backends.recording import contiguous, empty
from xformer.ops._numba.compile import EMPTY_1D, compiled_kernel, flatten, in_array, kernel, out_array
from xformer.ops._numba.vector_math import ONE, ZERO
from xformer.ops.linear.definition import as_rows

_f32 = np.float32  # a Python number would turn a computation into float64


@kernel(in_array(2), in_array(1), in_array(1), float32, boolean, out_array(2), out_array(2))
def norm_kernel(x, weight, bias, epsilon, centered, y, statistics):
    """Compute layer norm if `centered`, else RMS norm.

    statistics: (2, rows), the mean and the inverse standard deviation of each row.
    """
    features = x.shape[1]
    for i in range(x.shape[0]):
        x_row, y_row, mean, variance = x[i], y[i], ZERO, ZERO
        if centered:
            for j in range(features):
                mean += x_row[j]
            mean /= _f32(features)
        for j in range(features):
            variance += (x_row[j] - mean) * (x_row[j] - mean)
        inverse = ONE / math.sqrt(variance / _f32(features) + epsilon)
        statistics[0, i], statistics[1, i] = mean, inverse
        if bias.size > 0:
            for j in range(features):
                y_row[j] = (x_row[j] - mean) * inverse * weight[j] + bias[j]
        else:
            for j in range(features):
                y_row[j] = (x_row[j] - mean) * inverse * weight[j]


@kernel(in_array(2), in_array(2), in_array(1), in_array(2), boolean, out_array(2), out_array(1), out_array(1))
def norm_vjp_kernel(g, x, weight, statistics, centered, dx, dweight, dbias):
    """With x^ the normalized rows and h = g w: dx = (h - mean(h) - x^ mean(h x^)) / sigma."""
    features = x.shape[1]
    for i in range(x.shape[0]):
        x_row, g_row, dx_row, mean, inverse = x[i], g[i], dx[i], statistics[0, i], statistics[1, i]
        mean_h, mean_product = ZERO, ZERO
        for j in range(features):
            x_hat, h = (x_row[j] - mean) * inverse, g_row[j] * weight[j]
            mean_h += h
            mean_product += h * x_hat
            dweight[j] += g_row[j] * x_hat
            dbias[j] += g_row[j]
        mean_h = mean_h / _f32(features) if centered else ZERO
        mean_product /= _f32(features)
        for j in range(features):
            x_hat = (x_row[j] - mean) * inverse
            dx_row[j] = (g_row[j] * weight[j] - mean_h - x_hat * mean_product) * inverse


def _norm(x: Any, weight: Any, bias: Any = None, *, epsilon: float, save: bool, centered: bool) -> tuple[Any, Any]:
    x_rows, weight = contiguous(as_rows(x)), flatten(weight)
    y, statistics = np.empty_like(x_rows), empty((2, len(x_rows)), x.dtype)
    bias = EMPTY_1D if bias is None else flatten(bias)
    norm_kernel(x_rows, weight, bias, epsilon, centered, y, statistics)
    return y.reshape(x.shape), (x_rows, weight, statistics)


def _norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float, centered: bool) -> tuple[Any, ...]:
    x_rows, weight, statistics = residuals
    dx, dweight, dbias = np.empty_like(x_rows), np.zeros_like(weight), np.zeros_like(weight)
    norm_vjp_kernel(contiguous(as_rows(g)), x_rows, weight, statistics, centered, dx, dweight, dbias)
    return (dx.reshape(g.shape), dweight, dbias)[: len(needs)]


KERNELS = [
    compiled_kernel(name, partial(_norm, centered=centered), partial(_norm_vjp, centered=centered))
    for name, centered in (("layer_norm", True), ("rms_norm", False))
]
