"""Arrays as arguments of compiled kernels, and the import of the modules with these kernels."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np

from xformer.backends.recording import contiguous
from xformer.kernels.numpy.arrays import is_mask_or_ids

_FLOAT32 = np.dtype(np.float32)

# Arguments for optional arrays that are absent.
EMPTY_1D, EMPTY_4D, EMPTY_MASK = np.empty(0, np.float32), np.empty((0,) * 4, np.float32), np.empty((0,) * 4, np.bool_)


@functools.cache
def import_error() -> str | None:
    """Return why compiled kernels cannot run, or None; a version of numba accepts only some versions of NumPy."""
    try:
        for name in ("microkernel", "rowwise_kernels"):
            importlib.import_module(f"xformer.kernels.numba.{name}")
    except ImportError as error:
        return f"numba cannot be imported: {error}"
    return "NUMBA_DISABLE_JIT is set" if importlib.import_module("numba").config.DISABLE_JIT else None


@functools.cache
def import_kernels(module: str) -> Any:
    """Import a module of compiled kernels when one is first needed, because that imports numba."""
    return importlib.import_module(f"xformer.kernels.numba.{module}")


def supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Accept aligned arrays, float32 except for masks and ids."""
    if arrays[0].dtype != _FLOAT32:
        return f"dtype {arrays[0].dtype} (compiled for float32)"
    for array in arrays:
        if array is None:
            continue
        if array.dtype != _FLOAT32 and not is_mask_or_ids(array):
            return f"dtype {array.dtype} (compiled for float32)"
        if not array.flags.aligned:
            return "an array is not aligned in memory"
    return import_error()


def flatten(x: Any, dtype: Any = None) -> Any:
    """Return all elements in C order as a vector; a view if possible."""
    return contiguous(x, dtype).reshape(-1)
