"""Affine maps on NumPy with compiled products, of many rows as in training and of few as in decoding."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.kernels.numba.thread_pool import share, threads_for
from xformer.kernels.numpy.linear import register_maps
from xformer.kernels.numpy.support import compiled, flat, loops_of, nothing

_LEAST_ROWS, _LEAST_OTHERS = 2, 32  # NumPy multiplies a single row without copying the matrix
_ROWS, _COLUMNS = 8, 48  # of tiles (microkernel), roughly: parts are made of whole ones
_FEW_ROWS = 44  # with fewer, the time goes into reading the other matrix, and copying it does not pay
_SUMS = 32_768  # of few rows, that stay in the cache while the other matrix passes by
_LEAST = 250_000  # multiplications: with fewer, calls count most
_LARGE = 64_000_000  # from here on parts are half as large, so that no thread waits long for another


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if math.prod(arrays[0].shape[:-1]) < _LEAST_ROWS:
        return "at most a single row"
    if any(array is not None and array.dtype != arrays[0].dtype for array in arrays):
        return "dtypes are mixed"
    return compiled(arrays, static)


def _contiguous(x: Any) -> Any:
    """The matrix itself, if its rows or columns are contiguous and it has elements."""
    return x if x.itemsize in x.strides else np.ascontiguousarray(x)


def _affine(a: Any, b: Any, bias: Any) -> Any:
    (rows, depth), columns = a.shape, b.shape[1]
    out = np.empty((rows, columns), a.dtype)
    work = rows * depth * columns
    if work < _LEAST or rows < _LEAST_ROWS or min(depth, columns) < _LEAST_OTHERS:
        np.matmul(a, b, out=out)
        return out if bias is None else np.add(out, bias, out=out)
    a, b, bias = _contiguous(a), _contiguous(b), nothing(1) if bias is None else flat(bias)
    few = rows < _FEW_ROWS and b.strides[1] == b.itemsize
    loops = loops_of("gemm")
    worker = loops.multiply_few_parts if few else loops.multiply_parts
    threads = threads_for(work)
    steps = _steps(rows, columns, 2 * threads if work > _LARGE and threads > 1 else threads, few)
    share(loops.multiply, worker, math.prod(map(_parts, (rows, columns), steps)), threads, a, b, bias, out, *steps)
    return out


def _parts(size: int, step: int) -> int:
    return -(-size // step)


def _steps(rows: int, columns: int, wanted: int, few: bool) -> tuple[int, int]:
    """Of how many rows and columns the parts of a product are, so many being wanted."""
    if few:
        wanted = max(wanted, -(-rows * columns // _SUMS))
    if wanted < 2:
        return rows, columns
    if few or columns > rows:
        return rows, -(-columns // wanted // _COLUMNS) * _COLUMNS
    return -(-rows // wanted // _ROWS) * _ROWS, columns


register_maps("numba", _affine, _supports, priority=20, kind="jit")
