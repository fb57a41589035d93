"""Layer norm on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.ops._numpy import FLOATS, row_blocks
from xformer.ops.linear.definition import as_rows
from xformer.ops.operation import Kernel


def _forward(x: Any, weight: Any, bias: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    normalized = x - x.mean(axis=-1, keepdims=True)
    variance = np.vecdot(normalized, normalized)[..., None]
    variance /= x.shape[-1]
    variance += epsilon
    inverse = np.divide(1.0, np.sqrt(variance, out=variance), out=variance)
    normalized *= inverse
    y = normalized * weight if save else np.multiply(normalized, weight, out=normalized)
    if bias is not None:
        y += bias
    return y, (normalized, inverse, weight)


def _vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    """With x^ the normalized rows and h = g w: dx = (h - mean(h) - x^ mean(h x^)) / sigma; means are products."""
    normalized, inverse, weight = residuals
    g_rows, x_hat, inverse = as_rows(g), as_rows(normalized), inverse.reshape(-1, 1)
    dx, dweight, mean_weight = np.empty_like(g_rows), np.zeros_like(weight), weight / len(weight)
    for block in row_blocks(g_rows, num_arrays=3):
        g_block, x_hat_block, dx_block = g_rows[block], x_hat[block], dx[block]
        np.multiply(g_block, x_hat_block, out=dx_block)
        dweight += dx_block.sum(axis=0)
        x_hat_block *= (dx_block @ mean_weight)[:, None]
        x_hat_block += (g_block @ mean_weight)[:, None]
        np.multiply(g_block, weight, out=dx_block)
        dx_block -= x_hat_block
        dx_block *= inverse[block]
    return dx.reshape(g.shape), dweight, (g_rows.sum(axis=0) if needs[2] else None)


KERNELS = [Kernel("numpy.layer_norm", "layer_norm", "numpy", _forward, _vjp, dtypes=FLOATS)]
