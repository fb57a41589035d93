"""Linear maps by the native library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel
from xformer.ops.linear.definition import split_heads


def _rows(x: Any) -> Any:
    return x if x.ndim == 2 else native.contiguous(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def matmul(x: Any, w: Any, bias: Any = None) -> Any:
    """Compute x @ w + bias for matrices in any memory layout."""
    out = np.empty((x.shape[0], w.shape[1]), np.float32)
    native.call("matmul", (x, w, out, None if bias is None else native.contiguous(bias)))
    return out


def _parameter_cotangents(rows: Any, g_rows: Any, weight: Any, needs: Any) -> tuple[Any, Any]:
    """Return the cotangents of weight and bias that are needed, the first in the weight's memory order."""
    dweight = dbias = None
    if needs[0]:
        dweight = matmul(g_rows.T, rows).T if weight.flags.f_contiguous else matmul(rows.T, g_rows)
    if needs[1]:
        dbias = np.empty(weight.shape[1], np.float32)
        native.call("sum_rows", (g_rows, dbias))
    return dweight, dbias


# --- linear ----------------------------------------------------------------------------------------------------------


def _forward(x: Any, weight: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    y = matmul(_rows(x), weight, bias)
    return y.reshape(*x.shape[:-1], weight.shape[1]), (x, weight)


def _vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight = residuals
    g_rows = native.contiguous(_rows(g))
    dx = matmul(g_rows, weight.T).reshape(x.shape) if needs[0] else None
    return dx, *_parameter_cotangents(_rows(x), g_rows, weight, needs[1:])


# --- project_heads ---------------------------------------------------------------------------------------------------


def _heads_forward(x: Any, *maps: Any, heads: Any, save: bool) -> tuple[Any, Any]:
    rows, outputs = _rows(x), []
    for weight, bias, count in zip(maps[::2], maps[1::2], heads, strict=True):
        outputs.append(split_heads(matmul(rows, weight, bias), x.shape, count))
    return tuple(outputs), (x, maps[::2])


def _heads_vjp(g: Any, residuals: Any, needs: Any, *, heads: Any) -> tuple[Any, ...]:
    """Sum the cotangents of x over the maps; an output without a cotangent (None) contributes nothing."""
    x, weights = residuals
    rows, dx = _rows(x), None
    dmaps: list[Any] = []
    for index, (g_heads, weight) in enumerate(zip(g, weights, strict=True)):
        if g_heads is None:
            dmaps += None, None
            continue
        g_rows = native.contiguous(g_heads.transpose(0, 2, 1, 3)).reshape(len(rows), weight.shape[1])
        if needs[0] and dx is None:
            dx = matmul(g_rows, weight.T)
        elif needs[0]:
            native.call("matmul", (g_rows, weight.T, dx), True)
        dmaps += _parameter_cotangents(rows, g_rows, weight, needs[1 + 2 * index : 3 + 2 * index])
    return None if dx is None else dx.reshape(x.shape), *dmaps


KERNELS = [native_kernel("linear", _forward, _vjp), native_kernel("project_heads", _heads_forward, _heads_vjp)]
