"""Layer norm and RMS norm on NumPy by the native library."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel, rows_of

_BLOCK_ELEMENTS, _MAX_BLOCKS = 32_768, 16  # blocks of rows, whose sums for the derivative are added in order


def _norm(x: Any, weight: Any, bias: Any = None, *, epsilon: float, save: bool, centered: bool) -> tuple[Any, Any]:
    rows, weight = rows_of(x), native.contiguous(weight)
    y, statistics = np.empty(rows.shape, x.dtype), np.empty((2, len(rows)), x.dtype)
    bias = None if bias is None else native.contiguous(bias)
    native.call("norm", (rows, weight, bias, y, statistics), centered, n0=epsilon)
    return y.reshape(x.shape), (rows, weight, statistics)


def _norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float, centered: bool) -> tuple[Any, ...]:
    rows, weight, statistics = residuals
    blocks = max(1, min(len(rows), math.ceil(rows.size / _BLOCK_ELEMENTS), _MAX_BLOCKS))
    dx, sums = np.empty(rows.shape, rows.dtype), np.empty((blocks, 2, rows.shape[1]), rows.dtype)
    native.call("norm_vjp", (rows_of(g), rows, weight, statistics, dx, sums), centered)
    totals = sums[0]
    if blocks > 1:
        totals = np.empty(sums.shape[1:], rows.dtype)
        native.call("sum", (sums, totals), 1)
    return (dx.reshape(g.shape), *totals)[: len(needs)]


KERNELS = [
    native_kernel(name, partial(_norm, centered=centered), partial(_norm_vjp, centered=centered))
    for name, centered in (("layer_norm", True), ("rms_norm", False))
]
