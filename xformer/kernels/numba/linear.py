"""Linear maps on NumPy with compiled products: of many rows as in training, of a few or a single row as in decoding.

On CPUs of AMD, NumPy's BLAS library computes products of many rows.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from xformer.backends.recording import contiguous, empty
from xformer.kernels.numba import arrays as numba_arrays
from xformer.kernels.numba.arrays import EMPTY_1D, flatten, import_kernels
from xformer.kernels.numba.thread_pool import run_parallel, threads_for
from xformer.kernels.numpy.linear import register_linear
from xformer.threads import available_threads

_MIN_COLUMNS = 32
_TILE_ROWS, _TILE_COLUMNS = 8, 48  # multiples of the microkernel's tile: parts consist of complete tiles
_FEW_ROWS = 44  # with fewer, reading the right matrix takes the time, and copying it does not pay off
_FEW_ROWS_TRANSPOSED = 32  # the same, for a matrix whose columns are contiguous, such as tied embeddings
_MAX_SUMS = 32_768  # of few rows, which stay in the cache while the right matrix is read
_MIN_MULTIPLICATIONS = 250_000  # with fewer, the overhead of a call dominates
_MANY_MULTIPLICATIONS = 64_000_000  # above, parts are half as large, so that no thread waits long for another
_MIN_ROW_MULTIPLICATIONS = 50_000  # of a single row
# Parts of a product of a single row depend on the shape only, because sums of parts of the depth depend on them. Long
# rows are split by columns, as the sums of a part stay in the first-level cache; others by depth, so that a part is
# contiguous.
_PART_DEPTH, _MAX_DEPTH_PARTS, _PART_COLUMNS, _PART_ELEMENTS = 128, 8, 1024, 65_536
_GROUP = 8  # rows of the matrix that are read at a time


# OpenBLAS is up to 1.4 times faster on CPUs of AMD for products of this many rows and multiplications. For smaller
# ones, as in decoding, its threads, which wait for the next product in a loop, take the time of the compiled kernels
# between products.
_MANY_ROWS_AMD = 200
_MIN_BLAS_MULTIPLICATIONS = 8_000_000


def _many_rows(cpu_name: str) -> float:
    """Return the number of rows from which NumPy's BLAS is used, for a CPU by the name that LLVM gives it."""
    return _MANY_ROWS_AMD if cpu_name.startswith(("znver", "bdver", "btver")) else math.inf


@functools.cache
def _many_rows_here() -> float:
    return _many_rows(import_kernels("microkernel").CPU_NAME)


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if any(array is not None and array.dtype != arrays[0].dtype for array in arrays):
        return "mixed dtypes"
    if (reason := numba_arrays.supports(arrays, static)) is not None:
        return reason
    rows = math.prod(arrays[0].shape[:-1])
    num_multiplications = rows * sum(array.size for array in arrays[1:] if array is not None and array.ndim == 2)
    if _is_for_blas(rows, num_multiplications):
        return f"{rows} rows, for which NumPy's BLAS is faster on AMD"
    return None


def _is_for_blas(rows: int, num_multiplications: int) -> bool:
    return rows >= _many_rows_here() and num_multiplications >= _MIN_BLAS_MULTIPLICATIONS


def _contiguous(x: Any) -> Any:
    """Return a matrix whose rows or columns are contiguous."""
    return x if x.itemsize in x.strides else contiguous(x)


def _affine(a: Any, b: Any, bias: Any) -> Any:
    (rows, depth), columns = a.shape, b.shape[1]
    out = empty((rows, columns), a.dtype)
    num_multiplications = rows * depth * columns
    min_multiplications = _MIN_ROW_MULTIPLICATIONS if rows == 1 else _MIN_MULTIPLICATIONS
    is_small = num_multiplications < min_multiplications or min(depth, columns) < _MIN_COLUMNS
    if is_small or _is_for_blas(rows, num_multiplications):  # the latter: the gradient of the weight
        np.matmul(a, b, out=out)
        return out if bias is None else np.add(out, bias, out=out)
    b, bias = _contiguous(b), EMPTY_1D if bias is None else flatten(bias)
    is_transposed = b.strides[1] != b.itemsize
    if rows == 1 or (is_transposed and rows <= _FEW_ROWS_TRANSPOSED):
        return _multiply_rows(flatten(a), b, bias, out)
    a = _contiguous(a)
    few_rows = rows < _FEW_ROWS and not is_transposed
    kernels = import_kernels("gemm")
    body = kernels.multiply_few_rows_parts if few_rows else kernels.multiply_parts
    threads = threads_for(num_multiplications)
    steps = _part_size(
        rows, columns, 2 * threads if num_multiplications > _MANY_MULTIPLICATIONS and threads > 1 else threads, few_rows
    )
    num_parts = math.prod(-(-size // step) for size, step in zip((rows, columns), steps, strict=True))
    run_parallel(kernels.multiply, body, num_parts, threads, a, b, bias, out, *steps)
    return out


def _multiply_rows(a: Any, b: Any, bias: Any, out: Any) -> Any:
    """Compute out = a b + bias for a flat a of one row, or of a few if the columns of b are contiguous."""
    rows, (depth, columns) = out.shape[0], b.shape
    kernels = import_kernels("gemm")
    if b.strides[1] == b.itemsize:
        body = kernels.multiply_row_parts
        part_depth = max(_PART_DEPTH, -(-depth // (_MAX_DEPTH_PARTS * _GROUP)) * _GROUP)
        steps = (part_depth, columns) if columns <= 4 * _PART_COLUMNS else (depth, _PART_COLUMNS)
    else:
        body = kernels.multiply_rows_transposed_parts
        steps = depth, -(-_PART_ELEMENTS // (depth * _GROUP)) * _GROUP
    num_sums, num_column_parts = (-(-size // step) for size, step in zip((depth, columns), steps, strict=True))
    sums = out if num_sums == 1 else np.empty((num_sums * rows, columns), np.float32)
    num_parts = num_sums * num_column_parts
    run_parallel(kernels.multiply_rows, body, num_parts, available_threads(), a, b, bias, out, sums, *steps)
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
