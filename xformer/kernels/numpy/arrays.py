"""Dtypes of the arrays of NumPy kernels, and blocks that fit in the cache."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

_CACHE_BYTES = 512 * 1024  # half of a common second-level cache
_MASKS_AND_IDS = "?bBhHiIlLqQ"


def is_mask_or_ids(array: Any) -> bool:
    """Return whether an array is boolean or an array of integers."""
    return array.dtype.char in _MASKS_AND_IDS


def supports_floats(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Accept arrays that are all float32 or all float64, except for masks and ids."""
    common = None
    for array in arrays:
        if array is None:
            continue
        char = array.dtype.char
        if char == common or char in _MASKS_AND_IDS:
            continue
        if char not in "fd":
            return f"dtype {array.dtype} (kernels take float32 and float64)"
        if common is not None:
            return f"mixed dtypes {np.dtype(common)} and {array.dtype}"
        common = char
    return None


def row_blocks(matrix: Any, num_arrays: int) -> Iterator[slice]:
    """Yield blocks of rows; `num_arrays` such blocks stay in the cache for several passes."""
    step = max(1, _CACHE_BYTES // max(1, num_arrays * matrix.shape[1] * matrix.itemsize))
    for start in range(0, matrix.shape[0], step):
        yield slice(start, min(start + step, matrix.shape[0]))


@functools.lru_cache(maxsize=64)
def ones(length: int, dtype: Any) -> Any:
    """Return a vector of ones: a product with it sums rows several times faster than sum() does."""
    vector = np.ones(length, dtype=dtype)
    vector.flags.writeable = False
    return vector
