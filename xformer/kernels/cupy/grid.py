"""Launch grids, which depend only on shapes and dtypes: the same arrays give the same bits on every device."""

from __future__ import annotations

from typing import Any

_VECTOR_BYTES = 16
_MAX_BLOCKS = 2**20  # kernels loop over further work


def elements_per_thread(x: Any) -> int:
    """Return the number of elements that a thread loads at a time."""
    return _VECTOR_BYTES // x.itemsize


def grid_for_rows(rows: int, x: Any) -> tuple[int, int]:
    """Return the blocks, and threads per block, of a kernel with one block per row of x."""
    needed = -(-x.shape[-1] // elements_per_thread(x))
    return min(rows, _MAX_BLOCKS), min(512, max(32, -(-needed // 32) * 32))


def grid_for_elements(x: Any) -> tuple[int, int]:
    """Return the blocks, and threads per block, of an elementwise kernel."""
    return min(_MAX_BLOCKS, -(-x.size // (256 * elements_per_thread(x)))), 256
