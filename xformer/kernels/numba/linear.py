"""Linear maps on NumPy with compiled products, for many rows as in training and for few as in decoding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.recording import contiguous, empty
from xformer.kernels.numba import arrays as numba_arrays
from xformer.kernels.numba.arrays import EMPTY_1D, flatten, import_kernels
from xformer.kernels.numba.thread_pool import run_parallel, threads_for
from xformer.kernels.numpy.linear import register_linear

_MIN_ROWS, _MIN_COLUMNS = 2, 32  # NumPy multiplies a single row without copying the matrix
_TILE_ROWS, _TILE_COLUMNS = 8, 48  # multiples of a tile of the microkernel: parts consist of whole tiles
_FEW_ROWS = 44  # with fewer, reading the right matrix takes the time, and copying it does not pay off
_MAX_SUMS = 32_768  # of few rows, which stay in the cache while the right matrix is read
_MIN_MULTIPLICATIONS = 250_000  #  with fewer, the overhead of a call dominates
_MANY_MULTIPLICATIONS = 64_000_000  # above, parts are half as large, so that no thread waits long for another


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if math.prod(arrays[0].shape[:-1]) < _MIN_ROWS:
        return "fewer than two rows"
    if any(array is not None and array.dtype != arrays[0].dtype for array in arrays):
        return "mixed dtypes"
    return numba_arrays.supports(arrays, static)


def _contiguous(x: Any) -> Any:
    """Return a matrix whose rows or columns are contiguous."""
    return x if x.itemsize in x.strides else contiguous(x)


def _affine(a: Any, b: Any, bias: Any) -> Any:
    (rows, depth), columns = a.shape, b.shape[1]
    out = empty((rows, columns), a.dtype)
    num_multiplications = rows * depth * columns
    if num_multiplications < _MIN_MULTIPLICATIONS or rows < _MIN_ROWS or min(depth, columns) < _MIN_COLUMNS:
        np.matmul(a, b, out=out)
        return out if bias is None else np.add(out, bias, out=out)
    a, b, bias = _contiguous(a), _contiguous(b), EMPTY_1D if bias is None else flatten(bias)
    few_rows = rows < _FEW_ROWS and b.strides[1] == b.itemsize
    kernels = import_kernels("gemm")
    body = kernels.multiply_few_rows_parts if few_rows else kernels.multiply_parts
    threads = threads_for(num_multiplications)
    steps = _part_size(
        rows, columns, 2 * threads if num_multiplications > _MANY_MULTIPLICATIONS and threads > 1 else threads, few_rows
    )
    num_parts = math.prod(-(-size // step) for size, step in zip((rows, columns), steps, strict=True))
    run_parallel(kernels.multiply, body, num_parts, threads, a, b, bias, out, *steps)
    return out


def _part_size(rows: int, columns: int, num_parts: int, few_rows: bool) -> tuple[int, int]:
    """Choose the rows and columns of a part, so that the product has about `num_parts` parts."""
    if few_rows:
        num_parts = max(num_parts, -(-rows * columns // _MAX_SUMS))
    if num_parts < 2:
        return rows, columns
    if few_rows or columns > rows:
        return rows, -(-columns // num_parts // _TILE_COLUMNS) * _TILE_COLUMNS
    return -(-rows // num_parts // _TILE_ROWS) * _TILE_ROWS, columns


register_linear("numba", _affine, _supports, priority=20, disabled_by="no-jit")
