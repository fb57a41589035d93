"""Layer normalization and root mean square normalization on CuPy: a block a row, each pass over a row but the first
from the cache."""

from __future__ import annotations

from typing import Any

from xformer.backends import dtype_name
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.support import (
    SUMMING_THREADS,
    column_blocks,
    column_total,
    contiguous,
    empty,
    fits,
    names,
    row_blocks,
    row_count,
    unserved,
    wide,
)
from xformer.kernels.registry import Kernel, register


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, weight, *rest = arrays
    if reason := unserved(x):
        return reason
    for parameter in (weight, *rest):
        if parameter is None:
            continue
        if parameter.dtype != weight.dtype or not fits(parameter, x):
            return f"parameters of dtype {dtype_name(parameter.dtype)} for rows of {dtype_name(x.dtype)}"
        if parameter.shape != x.shape[-1:]:
            return "a parameter is broadcast"
    return None


def _forward(x: Any, weight: Any, bias: Any, centred: int, epsilon: float, save: bool) -> tuple[Any, Any]:
    x, weight, bias = contiguous(x), contiguous(weight), None if bias is None else contiguous(bias)
    rows, n = row_count(x), x.shape[-1]
    y = empty(x)
    means, inverses = (empty(x, (rows,), wide(x)) if save else None for _ in range(2))
    settings = rows, n, centred, float(epsilon)
    cuda_launch.launch(
        "norms.normalize", names(x, weight), *row_blocks(rows, x), x, weight, bias, y, means, inverses, *settings
    )
    return y, (x, weight, means, inverses)


def _vjp(g: Any, residuals: Any, centred: int, needs: tuple[bool, bool, bool]) -> tuple[Any, Any, Any]:
    """Cotangents of x, weight and bias, None where not needed."""
    x, weight, means, inverses = residuals
    g, rows, n = contiguous(g, x.dtype), row_count(x), x.shape[-1]
    dx = dweight = dbias = None
    if needs[0]:
        dx = empty(x)
        arrays = g, x, weight, means, inverses, dx
        cuda_launch.launch("norms.normalize_vjp", names(x, weight), *row_blocks(rows, x), *arrays, rows, n, centred)
    if needs[1] or needs[2]:
        blocks, chunks, chunk_rows = column_blocks(x, rows)
        dweight, dbias = (empty(x, (chunks, n), wide(x)) if needed else None for needed in (True, needs[2]))
        arrays = g, x, means, inverses, dweight, dbias
        launched = "norms.normalize_parameters_vjp", names(x), blocks, SUMMING_THREADS
        cuda_launch.launch(*launched, *arrays, rows, n, chunk_rows)
        dweight, dbias = (None if sums is None else column_total(sums, weight.dtype) for sums in (dweight, dbias))
    return dx, dweight, dbias


def _layer_norm_forward(x: Any, weight: Any, bias: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    return _forward(x, weight, bias, 1, epsilon, save)


def _layer_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    return _vjp(g, residuals, 1, needs)


def _rms_norm_forward(x: Any, weight: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    return _forward(x, weight, None, 0, epsilon, save)


def _rms_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    return _vjp(g, residuals, 0, (*needs, False))[:2]


register(Kernel("cupy.layer_norm", "layer_norm", "cupy", _supports, _layer_norm_forward, _layer_norm_vjp))
register(Kernel("cupy.rms_norm", "rms_norm", "cupy", _supports, _rms_norm_forward, _rms_norm_vjp))
