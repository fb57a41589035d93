"""What several NumPy kernels share."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

_CACHE_BYTES = 512 * 1024  # half of a common second-level cache
_MASKS_AND_IDS = "?bBhHiIlLqQ"


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
