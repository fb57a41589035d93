"""Adapt xformer to NumPy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.backends import portable
from xformer.backends.array_types import Device, DType
from xformer.backends.array_types import NativeArray as Array
from xformer.backends.library import KEPT_BYTES, Library
from xformer.backends.portable import compute_in_float32
from xformer.errors import BackendError, how_to_install


def bfloat16() -> DType:
    """Return the bfloat16 dtype of ml_dtypes, which NumPy and CuPy understand."""
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise BackendError(f"bfloat16 needs ml_dtypes; {how_to_install('ml_dtypes')}") from error


class NumpyLibrary(Library, library="numpy"):
    """Adapt xformer to NumPy."""

    is_writable = True
    needs_upcast = True  # bfloat16 * 2.0 is float32, and many functions take no bfloat16 or are slow in 16 bits

    @property
    def bfloat16(self) -> DType:
        """Return the dtype of ml_dtypes."""
        return bfloat16()

    def _place(self, data: Any, dtype: DType | None, device: Device) -> Array:
        """Return the data itself, cast if necessary."""
        if device not in (None, "cpu"):
            raise BackendError(f"numpy cannot place data on device {device!r}; it knows only 'cpu'")
        return data if dtype is None else data.astype(dtype, copy=False)

    def to_host(self, array: Array) -> Any:
        """Return the array itself, but bfloat16 as float32; a traced array has no values on the host and raises."""
        host = np.asarray(array)
        is_bfloat16 = host.dtype.kind == "V" and host.dtype.name == "bfloat16"  # names take longer than kinds
        return host.astype("float32") if is_bfloat16 else host

    def is_host_accessible(self, array: Array) -> bool:
        """Return whether the array has values: it is not traced."""
        return isinstance(array, np.ndarray | np.generic)

    def keep(self, array: Array) -> tuple[Array, Callable[[], bool] | None]:
        """Copy small arrays, and parts of an array of others; make the rest read-only, which costs nothing.

        Some values are compared afterwards, because a view that was made before can still be written.
        """
        if isinstance(array, np.generic):
            return array, None
        if array.nbytes <= KEPT_BYTES or (array.flags.writeable and _base_has_other_users(array)):
            return np.array(array), None
        _lock(array)
        step = max(1, array.size // 16)
        values = array.flat[::step].tobytes()

        def end() -> bool:
            _unlock(array)
            return bool(array.flat[::step].tobytes() == values)

        return array, end

    def share_memory(self, x: Array, y: Array) -> bool:
        """Compare the bounds of the memory."""
        return bool(np.may_share_memory(x, y))

    @compute_in_float32
    def erf(self, x: Array) -> Array:
        """Compute erf by SciPy if it is installed: it takes a tenth of the time."""
        return portable.erf(self, x) if _erf() is None else _erf()(x)

    @compute_in_float32
    def scatter_add(self, target: Array, indices: Array, updates: Array) -> Array:
        """Add by `np.add.at`."""
        result = target.copy()
        np.add.at(result, indices, updates)
        return result

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """Partition off the k largest values, then sort those."""
        return portable.ranked(self, x, np.argpartition(x, x.shape[-1] - k, axis=-1)[..., -k:])


# Arrays that are read-only for now, by id, with the number of those who keep them.
_locked: dict[int, list[Any]] = {}
_lock_of_locked = threading.Lock()


def _base_has_other_users(array: Array) -> bool:
    return isinstance(array.base, np.ndarray) and _references_of_base(array) > _REFERENCES_BY_ONE_VIEW


def owns_memory(array: Array) -> bool:
    """Return whether no other array has a part of the memory, which may be written."""
    is_only_view = isinstance(array.base, np.ndarray) and not _base_has_other_users(array)
    return bool(array.flags.writeable and (array.base is None or is_only_view))


def _references_of_base(array: Array) -> int:
    return sys.getrefcount(array.base)


_REFERENCES_BY_ONE_VIEW = _references_of_base(np.empty(2)[:1])


def _lock(array: Array) -> None:
    with _lock_of_locked:
        if id(array) in _locked:
            _locked[id(array)][1] += 1
        elif array.flags.writeable:
            array.flags.writeable = False
            _locked[id(array)] = [array, 1]


def _unlock(array: Array) -> None:
    with _lock_of_locked:
        entry = _locked.get(id(array))
        if entry is None:
            return
        entry[1] -= 1
        if not entry[1]:
            del _locked[id(array)]
            array.flags.writeable = True


@functools.cache
def _erf() -> Any:
    if importlib.util.find_spec("scipy") is None:
        return None
    return importlib.import_module("scipy.special").erf
