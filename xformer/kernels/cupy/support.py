"""What several CuPy kernels share: which arrays they take, how work is cut into blocks, sums over rows.

How it is cut depends on shapes and dtypes alone, so that the same arrays give the same bits on every device.
"""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import accumulation_dtype, array_namespace, dtype_name, is_floating, is_half_precision
from xformer.kernels.cupy import launch as cuda_launch

SUMMING_THREADS = 256  # of kernels that sum over rows: as many warps as cuda/common.cu says
_BYTES_AT_ONCE = 16
_MOST_BLOCKS = 2**20  # blocks go on with what more would have done


def unserved(x: Any) -> str | None:
    """Why kernels do not take x, if so: it is not floating, or on another device."""
    if not is_floating(x.dtype):
        return f"dtype {dtype_name(x.dtype)} (kernels take floating ones)"
    return None if cuda_launch.is_here(x) else f"arrays are on {x.device}, which is not the current device"


def floats(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Support one floating dtype throughout, that of the first array; masks, ids and None aside."""
    if reason := unserved(arrays[0]):
        return reason
    dtype = arrays[0].dtype
    for array in arrays:
        if array is not None and array.dtype != dtype and is_floating(array.dtype):
            return f"dtypes {dtype_name(dtype)} and {dtype_name(array.dtype)} are mixed"
    return None


def fits(parameter: Any, x: Any) -> bool:
    """Whether a parameter has the dtype of x, or, x having 16 bits, float32."""
    dtype, of_x = dtype_name(parameter.dtype), dtype_name(x.dtype)
    return dtype == of_x or (dtype == "float32" and is_half_precision(x.dtype))


def names(*arrays: Any) -> tuple[str, ...]:
    """The dtypes of arrays, as a launch wants them."""
    return tuple(dtype_name(array.dtype) for array in arrays)


def wide(x: Any) -> Any:
    """The dtype that kernels compute in for x: float32, or float64 for float64."""
    return accumulation_dtype(array_namespace(x), x.dtype)


def contiguous(x: Any, dtype: Any = None) -> Any:
    """All elements in C order, one after the other: x itself where it is so; in another dtype if one is given."""
    if dtype is not None and x.dtype != dtype:
        x = array_namespace(x).astype(x, dtype)
    return x if x.flags.c_contiguous else array_namespace(x).ascontiguousarray(x)


def empty(like: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """A new array, in C order, of the shape and dtype of another unless it says otherwise."""
    xp = array_namespace(like)
    return xp.empty(like.shape if shape is None else shape, dtype=like.dtype if dtype is None else dtype)


def at_once(x: Any) -> int:
    """How many elements a thread takes at once."""
    return _BYTES_AT_ONCE // x.itemsize  # type: ignore[no-any-return]


def row_count(x: Any) -> int:
    """How many rows there are along the last axis."""
    return math.prod(x.shape[:-1])


def row_blocks(rows: int, x: Any) -> tuple[int, int]:
    """Blocks and threads of a kernel that has a block a row of x."""
    needed = -(-x.shape[-1] // at_once(x))
    return min(rows, _MOST_BLOCKS), min(512, max(32, -(-needed // 32) * 32))


def flat_blocks(x: Any) -> tuple[int, int]:
    """Blocks and threads of a kernel that has a thread for what is taken of x at once."""
    return min(_MOST_BLOCKS, -(-x.size // (256 * at_once(x)))), 256


def column_blocks(x: Any, rows: int) -> tuple[int, int, int]:
    """Blocks, chunks and rows of a chunk for sums over the rows of x, whose last axis stays.

    Enough blocks for a large device, if a chunk keeps 32 rows.
    """
    tiles = -(-x.shape[-1] // (32 * at_once(x)))
    chunks = max(1, min(-(-rows // 32), 1024 // max(1, tiles)))
    chunk_rows = max(1, -(-rows // chunks))
    chunks = max(1, -(-rows // chunk_rows))
    return tiles * chunks, chunks, chunk_rows


def column_sums(x: Any, dtype: Any) -> Any:
    """Sum a matrix (rows, n) over its rows, in float32 or wider and in a fixed order: (n,), of that dtype."""
    x = contiguous(x)
    blocks, chunks, chunk_rows = column_blocks(x, len(x))
    if chunks == 1:
        return column_total(x, dtype)
    sums = empty(x, (chunks, x.shape[1]), wide(x))
    _sum_chunks(x, sums, blocks, chunk_rows)
    return column_total(sums, dtype)


def column_total(x: Any, dtype: Any) -> Any:
    """The same in one step, for few rows."""
    total = empty(x, x.shape[1:], dtype)
    _sum_chunks(x, total, -(-x.shape[1] // (32 * at_once(x))), len(x))
    return total


def _sum_chunks(x: Any, sums: Any, blocks: int, chunk_rows: int) -> None:
    dtypes = names(x, sums)
    cuda_launch.launch("columns.column_sums", dtypes, blocks, SUMMING_THREADS, x, sums, *x.shape, chunk_rows)
