"""Embedding on CuPy; its derivative sums the rows of an id in one order."""

from __future__ import annotations

from typing import Any

from xformer.backends import array_namespace
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import FLOATS, compute_dtype, contiguous, dtype_names, empty, why_not
from xformer.kernels.cupy.grid import grid_for_rows
from xformer.ops.operation import Kernel

_SEGMENT = 64  # sorted ids whose rows one block sums


def _forward(weight: Any, ids: Any, *, scale: float, save: bool) -> tuple[Any, Any]:
    ids = contiguous(ids, array_namespace(ids).int64)
    rows, n = weight.shape
    y = empty(weight, (*ids.shape, n))
    blocks = grid_for_rows(ids.size, weight)
    sizes = ids.size, rows, n, float(scale)
    cuda_launch.launch("embedding.gather", dtype_names(weight), *blocks, weight, ids, y, *sizes)
    return y, (ids, weight)


def _vjp(g: Any, residuals: Any, needs: Any, *, scale: float) -> tuple[Any, ...]:
    """Sort the ids, and sum the rows of each id in their order, in float32 or float64."""
    ids, weight = residuals
    xp, g = array_namespace(g), contiguous(g, weight.dtype)
    dweight = xp.zeros(weight.shape, dtype=weight.dtype)
    count, (rows, n) = ids.size, weight.shape
    if count:
        ids = xp.reshape(ids, (-1,))
        order = xp.argsort(ids, stable=True)
        sorted_ids = xp.take(ids, order, axis=0)
        segments = -(-count // _SEGMENT)
        heads, tails = (empty(g, (segments, n), compute_dtype(g)) for _ in range(2))
        sizes = count, rows, n, _SEGMENT
        arrays = g, order, sorted_ids, dweight, heads, tails
        settings = *sizes, float(scale)
        cuda_launch.launch("embedding.scatter_segments", dtype_names(g), *grid_for_rows(count, g), *arrays, *settings)
        grid = grid_for_rows(segments - 1, g)
        cuda_launch.launch("embedding.scatter_join", dtype_names(g), *grid, sorted_ids, heads, tails, dweight, *sizes)
    return dweight, None


def _why_not(weight: Any, ids: Any, **options: Any) -> str | None:
    return why_not(weight) if weight.flags.c_contiguous else "the weight is not contiguous"


KERNELS = [Kernel("cupy.embedding", "embedding", "cupy", _forward, _vjp, dtypes=FLOATS, why_not=_why_not)]
