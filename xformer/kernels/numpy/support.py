"""What several NumPy kernels share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

_CACHE_BYTES = 512 * 1024  # half of a common second-level cache
_MASKS_AND_IDS = "?bBhHiIlLqQ"
_FLOAT32 = np.dtype(np.float32)


def floats(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Support float32 and float64, one of them throughout (masks and ids aside)."""
    found = None
    for array in arrays:
        if array is None:
            continue
        char = array.dtype.char
        if char == found or char in _MASKS_AND_IDS:
            continue
        if char not in "fd":
            return f"dtype {array.dtype} (kernels take float32 and float64)"
        if found is not None:
            return f"dtypes {np.dtype(found)} and {array.dtype} are mixed"
        found = char
    return None


def rows_at_a_time(rows: Any, arrays: int) -> Iterator[slice]:
    """Cut a matrix into blocks of rows, so that `arrays` such blocks stay in the cache through several passes."""
    step = max(1, _CACHE_BYTES // max(1, arrays * rows.shape[1] * rows.itemsize))
    for start in range(0, rows.shape[0], step):
        yield slice(start, min(start + step, rows.shape[0]))


@functools.lru_cache(maxsize=64)
def ones(length: int, dtype: Any) -> Any:
    """A vector of ones: a product with it sums rows several times faster than sum() does."""
    vector = np.ones(length, dtype=dtype)
    vector.flags.writeable = False
    return vector


# --- what compiled kernels share --------------------------------------------------------------------------------------


@functools.cache
def _import() -> tuple[Any, str | None]:
    """The compiled loops, or why there are none: numba serves only the versions of NumPy that it knows."""
    try:
        importlib.import_module("xformer.kernels.numba.microkernel")
        module = importlib.import_module("xformer.kernels.numba.loops")
    except ImportError as reason:
        return None, f"numba cannot be imported: {reason}"
    off = importlib.import_module("numba").config.DISABLE_JIT
    return module, "numba is switched off by NUMBA_DISABLE_JIT" if off else None


def loops() -> Any:
    """The module of compiled loops, imported when it is first needed."""
    return _import()[0]


@functools.cache
def loops_of(part: str) -> Any:
    """Import a module of compiled loops."""
    return importlib.import_module(f"xformer.kernels.numba.{part}")


def compiled(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """None for arrays that compiled loops can read, the first of them float32, else the reason why not."""
    if arrays[0].dtype != _FLOAT32:
        return f"dtype {arrays[0].dtype} (compiled for float32)"
    for array in arrays:
        if array is None:
            continue
        if array.dtype != _FLOAT32 and array.dtype.char not in _MASKS_AND_IDS:
            return f"dtype {array.dtype} (compiled for float32)"
        if not array.flags.aligned:
            return "an array is not aligned in memory"
    return _import()[1]


def flat(x: Any, dtype: Any = None) -> Any:
    """All elements, one after the other in memory."""
    return np.ascontiguousarray(x, dtype).reshape(-1)


@functools.cache
def nothing(axes: int, dtype: Any = np.float32) -> Any:
    """What a loop is given when it is to do without an array."""
    return np.empty((0,) * axes, dtype)
