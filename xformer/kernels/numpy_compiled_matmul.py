"""Linear maps on NumPy with compiled products: faster than NumPy's on matrices of some hundred rows and columns."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from xformer.host import num_threads, side_by_side
from xformer.kernels.numpy_linear import register_maps
from xformer.kernels.numpy_support import compiled
from xformer.ops.linear import as_rows

# Of rows: with fewer, the time goes into reading the other matrix, which NumPy does without copying it.
_LEAST = 32
_LEAST_WORK = 8_000_000  # multiplications, a tenth of a millisecond: what handing a part over must save


@functools.cache
def _multiply() -> Any:
    return importlib.import_module("xformer.kernels.numpy_compiled_matmul_loops").multiply


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if len(as_rows(arrays[0])) < _LEAST:
        return f"less than {_LEAST} rows"
    return compiled(arrays, static)


def _contiguous(x: Any) -> Any:
    """The matrix itself, if its rows or columns are contiguous and it has elements."""
    return x if x.itemsize in x.strides else np.ascontiguousarray(x)


def _product(a: Any, b: Any) -> Any:
    (rows, depth), columns = a.shape, b.shape[1]
    out = np.empty((rows, columns), a.dtype)
    if min(rows, depth, columns) < _LEAST:
        return np.matmul(a, b, out=out)
    a, b = _contiguous(a), _contiguous(b)
    multiply, by_rows = _multiply(), rows >= columns
    parts = min(num_threads(), rows * depth * columns // _LEAST_WORK)
    if parts < 2:
        multiply(a, b, out)
        return out
    step = -(-max(rows, columns) // parts // _LEAST) * _LEAST
    cuts = [slice(first, first + step) for first in range(0, max(rows, columns), step)]
    side_by_side(lambda cut: multiply(a[cut], b, out[cut]) if by_rows else multiply(a, b[:, cut], out[:, cut]), cuts)
    return out


register_maps("numba", _product, _supports, compiled=True)
