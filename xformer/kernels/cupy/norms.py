"""Layer norm and RMS norm on CuPy: a warp or a block reads a row once and keeps it in registers."""

from __future__ import annotations

from typing import Any

from xformer.backends import dtype_name
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import (
    compute_dtype,
    contiguous,
    dtype_names,
    empty,
    is_compatible_dtype,
    row_count,
    why_not,
)
from xformer.kernels.cupy.columns import SUMMING_THREADS, column_total, grid_for_columns
from xformer.kernels.cupy.grid import grid_for_shared_rows
from xformer.ops.operation import Kernel

# Vectors of a row that a thread keeps in registers: R in cuda/norms.cu. The derivative keeps two rows.
_VECTORS, _VJP_VECTORS = 4, 2
_MIN_THREADS = 32  # per row, so that a warp does not diverge at the branch for large numbers


def _why_not(x: Any, weight: Any, *rest: Any, **options: Any) -> str | None:
    for parameter in (weight, *rest):
        if parameter is not None and (parameter.dtype != weight.dtype or not is_compatible_dtype(parameter, x)):
            return f"parameters of dtype {dtype_name(parameter.dtype)} with {dtype_name(x.dtype)} rows"
    return why_not(x)


def _forward(x: Any, weight: Any, bias: Any, centered: int, epsilon: float, save: bool) -> tuple[Any, Any]:
    x, weight, bias = contiguous(x), contiguous(weight), None if bias is None else contiguous(bias)
    rows, n = row_count(x), x.shape[-1]
    y = empty(x)
    means, inverses = (empty(x, (rows,), compute_dtype(x)) if save else None for _ in range(2))
    *grid, threads = grid_for_shared_rows(rows, x, _VECTORS, _MIN_THREADS)
    settings = rows, n, centered, float(epsilon), threads
    cuda_launch.launch(
        "norms.normalize",
        dtype_names(x, weight),
        *grid,
        x,
        weight,
        bias,
        y,
        means,
        inverses,
        *settings,
    )
    return y, (x, weight, means, inverses)


def _vjp(g: Any, residuals: Any, centered: int, needs: tuple[bool, bool, bool]) -> tuple[Any, Any, Any]:
    """Return the cotangents of x, weight and bias, None if not needed."""
    x, weight, means, inverses = residuals
    g, rows, n = contiguous(g, x.dtype), row_count(x), x.shape[-1]
    dx = dweight = dbias = None
    if needs[0]:
        dx = empty(x)
        arrays = g, x, weight, means, inverses, dx
        *grid, threads = grid_for_shared_rows(rows, x, _VJP_VECTORS, _MIN_THREADS)
        settings = rows, n, centered, threads
        cuda_launch.launch("norms.normalize_vjp", dtype_names(x, weight), *grid, *arrays, *settings)
    if needs[1] or needs[2]:
        blocks, chunks, chunk_rows = grid_for_columns(x, rows)
        dweight, dbias = (empty(x, (chunks, n), compute_dtype(x)) if needed else None for needed in (True, needs[2]))
        arrays = g, x, means, inverses, dweight, dbias
        sizes = rows, n, chunk_rows
        cuda_launch.launch("norms.normalize_parameters_vjp", dtype_names(x), blocks, SUMMING_THREADS, *arrays, *sizes)
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


KERNELS = [
    Kernel("cupy.layer_norm", "layer_norm", "cupy", _layer_norm_forward, _layer_norm_vjp, why_not=_why_not),
    Kernel("cupy.rms_norm", "rms_norm", "cupy", _rms_norm_forward, _rms_norm_vjp, why_not=_why_not),
]
