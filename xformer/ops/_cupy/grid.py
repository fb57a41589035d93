"""Launch grids, which depend only on shapes and dtypes: the same arrays give the same bits on every device."""

from __future__ import annotations

from typing import Any

_VECTOR_BYTES = 16
_MAX_BLOCKS = 2**20  # kernels loop over further work
_SHORT_ROW = 512  # elements; at most a warp reads such a row
_SHORT_ROW_THREADS = 128  # per block


def elements_per_thread(x: Any) -> int:
    """Return the number of elements that a thread loads at a time."""
    return _VECTOR_BYTES // x.itemsize


def grid_for_rows(rows: int, x: Any, vectors: int = 1) -> tuple[int, int]:
    """Return the blocks, and threads per block, of a kernel with one block per row of x.

    Each thread loads `vectors` times, or more often from rows that are longer than a block of 512 threads can load.
    """
    return min(rows, _MAX_BLOCKS), min(512, -(-_loads(x) // (32 * vectors)) * 32)


def grid_for_short_rows(rows: int, x: Any) -> tuple[int, int, int]:
    """Return the blocks, threads per block, and threads per row of a kernel with several short rows per block."""
    if x.shape[-1] > _SHORT_ROW:
        blocks, threads = grid_for_rows(rows, x)
        return blocks, threads, threads
    row_threads = min(32, 1 << (_loads(x) - 1).bit_length())
    return min(-(-rows * row_threads // _SHORT_ROW_THREADS), _MAX_BLOCKS), _SHORT_ROW_THREADS, row_threads


def _loads(x: Any) -> int:
    """Return the number of loads of a row."""
    return max(1, -(-x.shape[-1] // elements_per_thread(x)))


def grid_for_elements(x: Any) -> tuple[int, int]:
    """Return the blocks, and threads per block, of an elementwise kernel."""
    return min(_MAX_BLOCKS, -(-x.size // (256 * elements_per_thread(x)))), 256
