"""Linear maps on NumPy with compiled products of a few rows or a single one, as in decoding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends.recording import contiguous, empty
from xformer.ops._numba import gemm
from xformer.ops._numba.compile import EMPTY_1D, compiled_kernel, flatten, why_not
from xformer.ops._numba.microkernel import GROUP
from xformer.ops._numba.thread_pool import run_parallel, threads_for
from xformer.ops.linear.numpy import functions_with
from xformer.threads import available_threads

_MIN_COLUMNS = 32
_TILE_COLUMNS = 48  # a multiple of the microkernel's tile: parts consist of complete tiles
_MAX_ROWS = 43  # up to here reading the right matrix dominates, so it is not packed; larger products go to BLAS
_MAX_ROWS_TRANSPOSED = 32  # the same, for a matrix whose columns are contiguous, such as tied embeddings
_MAX_SUMS = 32_768  # which stay in the cache while the right matrix is read
_MIN_MULTIPLICATIONS = 250_000  # with fewer, the overhead of a call dominates
_MIN_ROW_MULTIPLICATIONS = 50_000  # of a single row
# Parts of a product of a single row depend on the shape only, because sums of parts of the depth depend on them. Long
# rows are split by columns, as the sums of a part stay in the first-level cache; others by depth, so that a part is
# contiguous.
_PART_DEPTH, _MAX_DEPTH_PARTS, _PART_COLUMNS, _PART_ELEMENTS = 128, 8, 1024, 65_536


def _why_not(x: Any, *maps: Any, **options: Any) -> str | None:
    if math.prod(x.shape[:-1]) > _MAX_ROWS:
        return f"more than {_MAX_ROWS} rows, a product for the BLAS library"
    return why_not(x, *maps)


def _contiguous(x: Any) -> Any:
    """Return a matrix whose rows or columns are contiguous."""
    return x if x.itemsize in x.strides else contiguous(x)


def _affine(a: Any, b: Any, bias: Any) -> Any:
    (rows, depth), columns = a.shape, b.shape[1]
    out = empty((rows, columns), a.dtype)
    num_multiplications = rows * depth * columns
    min_multiplications = _MIN_ROW_MULTIPLICATIONS if rows == 1 else _MIN_MULTIPLICATIONS
    b = _contiguous(b)
    is_transposed = b.strides[1] != b.itemsize
    if (
        num_multiplications < min_multiplications
        or min(depth, columns) < _MIN_COLUMNS
        or rows > (_MAX_ROWS_TRANSPOSED if is_transposed else _MAX_ROWS)
    ):
        np.matmul(a, b, out=out)
        return out if bias is None else np.add(out, bias, out=out)
    bias = EMPTY_1D if bias is None else flatten(bias)
    if rows == 1 or is_transposed:
        return _multiply_rows(flatten(a), b, bias, out)
    threads = threads_for(num_multiplications)
    num_parts = max(threads, -(-rows * columns // _MAX_SUMS))
    step = -(-columns // num_parts // _TILE_COLUMNS) * _TILE_COLUMNS if num_parts > 1 else columns
    body = gemm.multiply_few_rows_parts
    run_parallel(gemm.multiply, body, -(-columns // step), threads, _contiguous(a), b, bias, out, rows, step)
    return out


def _multiply_rows(a: Any, b: Any, bias: Any, out: Any) -> Any:
    """Compute out = a b + bias for a flat a of one row, or of a few if the columns of b are contiguous."""
    rows, (depth, columns) = out.shape[0], b.shape
    if b.strides[1] == b.itemsize:
        body = gemm.multiply_row_parts
        part_depth = max(_PART_DEPTH, -(-depth // (_MAX_DEPTH_PARTS * GROUP)) * GROUP)
        steps = (part_depth, columns) if columns <= 4 * _PART_COLUMNS else (depth, _PART_COLUMNS)
    else:
        body = gemm.multiply_rows_transposed_parts
        steps = depth, -(-_PART_ELEMENTS // (depth * GROUP)) * GROUP
    num_sums, num_column_parts = (-(-size // step) for size, step in zip((depth, columns), steps, strict=True))
    sums = out if num_sums == 1 else np.empty((num_sums * rows, columns), np.float32)
    num_parts = num_sums * num_column_parts
    run_parallel(gemm.multiply_rows, body, num_parts, available_threads(), a, b, bias, out, sums, *steps)
    return out


KERNELS = [compiled_kernel(name, *pair, why_not=_why_not) for name, pair in functions_with(_affine).items()]
