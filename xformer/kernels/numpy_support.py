"""What several NumPy kernels share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_CACHE_BYTES = 512 * 1024  # half of a common second-level cache


def floats(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Support float32 and float64, one of them throughout (masks and ids aside)."""
    found = None
    for array in arrays:
        if array is None or array.dtype.kind in "biu":
            continue
        if array.dtype.char not in "fd":
            return f"dtype {array.dtype} (kernels take float32 and float64)"
        if found is None:
            found = array.dtype
        elif array.dtype != found:
            return f"dtypes {found} and {array.dtype} are mixed"
    return None


def rows_at_a_time(rows: Any) -> Iterator[slice]:
    """Cut a matrix into blocks of rows that stay in the cache through several passes."""
    step = max(1, _CACHE_BYTES // max(1, rows.shape[1] * rows.itemsize))
    for start in range(0, rows.shape[0], step):
        yield slice(start, min(start + step, rows.shape[0]))
