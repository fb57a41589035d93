"""The sum of squares on NumPy by the native library."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel

_BLOCK = 16_384  # elements, as in native/src/rows.cpp
_ARRAYS = 11  # of one call
_TWO = np.asarray(2.0, np.float32)


def _contiguous(x: Any) -> Any:
    """Return the elements in the order of the memory, which needs no copy of Fortran order."""
    return x.T if x.flags.f_contiguous else native.contiguous(x)


def _forward(*arrays: Any, save: bool) -> tuple[Any, Any]:
    """Sum blocks in float32, and their sums in float64."""
    packed = list(map(_contiguous, arrays))
    counts = [-(-x.size // _BLOCK) for x in packed]
    sums, total = np.empty(sum(counts), np.float64), np.empty((), np.float64)
    start = 0
    for i in range(0, len(packed), _ARRAYS):
        end = start + sum(counts[i : i + _ARRAYS])
        native.call("sums_of_squares", (sums[start:end], *packed[i : i + _ARRAYS]))
        start = end
    native.call("sum", (sums, total), 1)
    return native.contiguous(total, np.float32), arrays


def _vjp(g: Any, arrays: Any, needs: Any) -> tuple[Any, ...]:
    scale, cotangents = np.empty((), np.float32), tuple(np.empty_like(x) for x in arrays)
    native.call("multiply", (g, _TWO, scale))
    for x, cotangent in zip(arrays, cotangents, strict=True):
        native.call("multiply", (x, scale, cotangent))
    return cotangents


KERNELS = [native_kernel("squared_norm", _forward, _vjp)]
