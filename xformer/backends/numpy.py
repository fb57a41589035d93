"""Facts about NumPy."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer.backends import portable
from xformer.backends.array_types import Device, DType, Namespace
from xformer.backends.array_types import NativeArray as Array
from xformer.backends.backend import Backend, register_backend
from xformer.backends.portable import compute_in_float32
from xformer.errors import BackendError, how_to_install

_GROUP = 64  # values per group of top_k; argpartition is slow, and the maxima of groups tell which groups it can skip


def bfloat16() -> DType:
    """Return the bfloat16 dtype of ml_dtypes, which NumPy and CuPy understand."""
    try:
        return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    except ImportError as error:
        raise BackendError(f"bfloat16 needs ml_dtypes; {how_to_install('ml_dtypes')}") from error


class NumpyBackend(Backend):
    """Facts about NumPy."""

    is_writable = True
    needs_upcast = True  # bfloat16 * 2.0 is float32, and many functions take no bfloat16 or are slow in 16 bits

    def dtype(self, xp: Namespace, name: str) -> DType:
        """Return the dtype called `name`; bfloat16 comes from ml_dtypes."""
        return bfloat16() if name == "bfloat16" else super().dtype(xp, name)

    def from_host(self, xp: Namespace, data: Any, dtype: DType | None, device: Device) -> Array:
        """Return the data itself, cast if necessary."""
        if device not in (None, "cpu"):
            raise BackendError(f"numpy cannot place data on device {device!r}; it knows only 'cpu'")
        return data if dtype is None else data.astype(dtype, copy=False)

    def to_host(self, array: Array) -> Any:
        """Return the array itself; a traced array has no values on the host and raises."""
        return np.asarray(array)

    def is_host_accessible(self, array: Array) -> bool:
        """Return whether the array has values: it is not traced."""
        return isinstance(array, np.ndarray | np.generic)

    @compute_in_float32
    def erf(self, x: Array) -> Array:
        """Compute erf by SciPy if it is installed: it takes a tenth of the time."""
        return _erf()(x)

    @compute_in_float32
    def scatter_add(self, target: Array, indices: Array, updates: Array) -> Array:
        """Add by `np.add.at`."""
        result = target.copy()
        np.add.at(result, indices, updates)
        return result

    def top_k(self, x: Array, k: int) -> tuple[Array, Array]:
        """Partition off the k largest values, then sort those."""
        if k == x.shape[-1]:
            return portable.top_k(x, k)
        indices = np.sort(_indices_of_largest(x, k), axis=-1)
        values = np.take_along_axis(x, indices, axis=-1)
        if portable.is_tied(x, values, k):
            return portable.top_k(x, k)
        values, order = portable.top_k(values, k)
        return values, np.take_along_axis(indices, order, axis=-1)


@functools.cache
def _erf() -> Callable[[Array], Array]:
    if importlib.util.find_spec("scipy") is None:
        return portable.erf
    return importlib.import_module("scipy.special").erf


def _indices_of_largest(x: Array, k: int) -> Array:
    """Return the indices of the k largest values, unordered."""
    size, groups = x.shape[-1], x.shape[-1] // _GROUP
    if groups < 4 * k:
        return np.argpartition(x, size - k, axis=-1)[..., -k:]
    # They are in the k groups with the largest maxima, or in the rest that fills no group.
    shape = x.shape[:-1]
    maxima = np.max(x[..., : groups * _GROUP].reshape(*shape, _GROUP, groups), axis=-2)
    best = np.argpartition(maxima, groups - k, axis=-1)[..., -k:]
    in_groups = best[..., None, :] + groups * np.arange(_GROUP)[:, None]  # (..., _GROUP, k)
    rest = np.arange(groups * _GROUP, size)
    candidates = np.concatenate(
        [in_groups.reshape(*shape, _GROUP * k), np.broadcast_to(rest, (*shape, rest.size))], axis=-1
    )
    values = np.take_along_axis(x, candidates, axis=-1)
    largest = np.argpartition(values, candidates.shape[-1] - k, axis=-1)[..., -k:]
    return np.take_along_axis(candidates, largest, axis=-1)


register_backend(NumpyBackend("numpy"))
