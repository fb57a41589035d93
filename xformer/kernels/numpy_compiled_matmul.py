"""Linear maps on NumPy with compiled products: faster than NumPy's on matrices of some hundred rows and columns."""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import numpy as np

from xformer.host import side_by_side, threads_here
from xformer.kernels.numpy_linear import register_maps
from xformer.kernels.numpy_support import compiled

# With fewer rows, the time goes into reading the other matrix, which NumPy does without copying it.
_LEAST_ROWS, _LEAST_OTHERS = 96, 32
# Of multiplications: with fewer, calls count most; and of a thread, so many that handing over a part pays. What lies
# between is done on one thread, although OpenBLAS would be faster on all: its threads then wait for more, busily, for
# milliseconds, and take the cores from all that comes.
_LEAST, _LEAST_A_THREAD = 250_000, 16_000_000


@functools.cache
def _multiply() -> Any:
    return importlib.import_module("xformer.kernels.numpy_compiled_matmul_loops").multiply


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if math.prod(arrays[0].shape[:-1]) < _LEAST_ROWS:
        return f"less than {_LEAST_ROWS} rows"
    if any(array is not None and array.dtype != arrays[0].dtype for array in arrays):
        return "dtypes are mixed"
    return compiled(arrays, static)


def _contiguous(x: Any) -> Any:
    """The matrix itself, if its rows or columns are contiguous and it has elements."""
    return x if x.itemsize in x.strides else np.ascontiguousarray(x)


def _product(a: Any, b: Any) -> Any:
    (rows, depth), columns = a.shape, b.shape[1]
    out = np.empty((rows, columns), a.dtype)
    work = rows * depth * columns
    if work < _LEAST or rows < _LEAST_ROWS or min(depth, columns) < _LEAST_OTHERS:
        return np.matmul(a, b, out=out)
    a, b = _contiguous(a), _contiguous(b)
    multiply, by_rows = _multiply(), rows >= columns
    parts = min(threads_here(), work // _LEAST_A_THREAD)
    if parts < 2:
        multiply(a, b, out)
        return out
    step = -(-max(rows, columns) // parts // _LEAST_OTHERS) * _LEAST_OTHERS
    cuts = [slice(first, first + step) for first in range(0, max(rows, columns), step)]
    side_by_side(lambda cut: multiply(a[cut], b, out[cut]) if by_rows else multiply(a, b[:, cut], out[:, cut]), cuts)
    return out


register_maps("numba", _product, _supports, compiled=True)
