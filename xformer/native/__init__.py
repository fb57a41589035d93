"""The native library: compiled kernels for arrays of NumPy, and programs of their calls. It is optional."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.native.library import CASTABLE as _CASTABLE
from xformer.native.library import MAX_DIMS as _MAX_DIMS
from xformer.native.library import WHY_NOT, Program, call, is_available, level, record

__all__ = ["WHY_NOT", "Program", "call", "can_copy", "contiguous", "is_available", "level", "record", "zeros"]


def can_copy(x: Any, dtype: Any) -> bool:
    """Return whether the library can copy an array of NumPy into one of a dtype.

    Args:
        x: Array.
        dtype: Dtype of the copy.
    """
    is_known = x.dtype in _CASTABLE and dtype in _CASTABLE
    return is_known and type(x) is np.ndarray and x.ndim <= _MAX_DIMS and x.flags.aligned and not WHY_NOT


def contiguous(x: Any, dtype: Any = None) -> Any:
    """Return an array as a C-contiguous one of a dtype: itself, or a copy.

    Args:
        x: Array of NumPy.
        dtype: Its dtype; default that of `x`.
    """
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    if x.flags.c_contiguous and x.dtype == dtype:
        return x
    if not can_copy(x, dtype):
        return np.ascontiguousarray(x, dtype) if x.ndim else np.asarray(x, dtype)
    copy = np.empty(x.shape, dtype)
    call("copy", (x, copy))
    return copy


def zeros(shape: Any, dtype: Any) -> Any:
    """Return an array of zeros.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """
    array = np.empty(shape, dtype)
    if can_copy(array, array.dtype):
        call("fill", (array,))
    else:
        array.fill(0)
    return array
