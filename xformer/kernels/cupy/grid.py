"""Launch grids, which depend only on shapes and dtypes: the same arrays give the same bits on every device."""

from __future__ import annotations

from typing import Any

_VECTOR_BYTES = 16
_MAX_BLOCKS = 2**20  # kernels loop over further work
_MAX_SMALL_BLOCKS = 2**14  # of threads that load little at a time: starting them takes as long as a load
_SHARING_THREADS = 128  # per block with several rows


def elements_per_thread(x: Any) -> int:
    """Return the number of elements that a thread loads at a time."""
    return _VECTOR_BYTES // x.itemsize


def grid_for_rows(rows: int, x: Any, vectors: int = 1) -> tuple[int, int]:
    """Return the blocks, and threads per block, of a kernel with one block per row of x.

    Each thread loads `vectors` times, or more often from rows that are longer than a block of 512 threads can load.
    """
    return min(rows, _MAX_BLOCKS), min(512, -(-_loads(x) // (32 * vectors)) * 32)


def grid_for_shared_rows(rows: int, x: Any, vectors: int, min_threads: int = 1) -> tuple[int, int, int]:
    """Return the blocks, threads per block, and threads per row of a kernel with several short rows per block.

    A short row has at most a warp, of which each thread loads `vectors` times; others are as `grid_for_rows` has them.
    """
    if _loads(x) > 32 * vectors:
        blocks, threads = grid_for_rows(rows, x, vectors)
        return blocks, threads, threads
    row_threads = max(min_threads, min(32, 1 << (_loads(x) - 1).bit_length()))
    return min(-(-rows * row_threads // _SHARING_THREADS), _MAX_SMALL_BLOCKS), _SHARING_THREADS, row_threads


def vectors_per_thread(x: Any, most: int) -> int:
    """Return how often a thread of a kernel that shares blocks loads: once if a warp can load a row, else `most`."""
    return 1 if _loads(x) <= 32 else most


def _loads(x: Any) -> int:
    """Return the number of loads of a row."""
    return max(1, -(-x.shape[-1] // elements_per_thread(x)))


def grid_for_elements(x: Any) -> tuple[int, int]:
    """Return the blocks, and threads per block, of an elementwise kernel."""
    return min(_MAX_SMALL_BLOCKS, -(-x.size // (256 * elements_per_thread(x)))), 256
