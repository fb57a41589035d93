"""Sums over rows, in a fixed order (cuda/columns.cu)."""

from __future__ import annotations

from typing import Any

from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import compute_dtype, contiguous, dtype_names, empty
from xformer.kernels.cupy.grid import elements_per_thread

SUMMING_THREADS = 256  # per block; SUMMING_WARPS in cuda/common.cu


def grid_for_columns(x: Any, rows: int) -> tuple[int, int, int]:
    """Return the blocks, chunks of rows and rows per chunk for sums over the rows of x.

    There are enough blocks for a large device if chunks of 32 rows allow it.
    """
    tiles = -(-x.shape[-1] // (32 * elements_per_thread(x)))
    chunks = max(1, min(-(-rows // 32), 1024 // max(1, tiles)))
    chunk_rows = max(1, -(-rows // chunks))
    chunks = max(1, -(-rows // chunk_rows))
    return tiles * chunks, chunks, chunk_rows


def column_sums(x: Any, dtype: Any) -> Any:
    """Sum a matrix (rows, n) over its rows, in float32 or float64, and return (n,) of `dtype`."""
    x = contiguous(x)
    blocks, chunks, chunk_rows = grid_for_columns(x, len(x))
    if chunks == 1:
        return column_total(x, dtype)
    sums = empty(x, (chunks, x.shape[1]), compute_dtype(x))
    _sum_chunks(x, sums, blocks, chunk_rows)
    return column_total(sums, dtype)


def column_total(x: Any, dtype: Any) -> Any:
    """Sum a matrix of few rows over its rows in one launch."""
    total = empty(x, x.shape[1:], dtype)
    _sum_chunks(x, total, -(-x.shape[1] // (32 * elements_per_thread(x))), len(x))
    return total


def _sum_chunks(x: Any, sums: Any, blocks: int, chunk_rows: int) -> None:
    dtypes = dtype_names(x, sums)
    cuda_launch.launch("columns.column_sums", dtypes, blocks, SUMMING_THREADS, x, sums, *x.shape, chunk_rows)
