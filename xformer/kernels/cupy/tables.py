"""Tables of many arrays, which one launch reads or writes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.kernels.cupy.arrays import dtype_names

BLOCK_ELEMENTS = 8192
THREADS = 256
# Tables of cuda/optimizer.cu; with the other arguments they fit in the 4 KiB that every device accepts.
MAX_SLOTS, MAX_ARRAYS, MAX_PAIRS = 64, 128, 112
SLOTS = np.dtype(
    [(name, np.uint64, MAX_SLOTS) for name in ("parameters", "gradients", "exp_avgs", "exp_avg_sqs")]
    + [("sizes", np.int64, MAX_SLOTS), ("weight_decays", np.float64, MAX_SLOTS), ("ends", np.int64, MAX_SLOTS)]
)
ARRAYS = np.dtype(
    [("addresses", np.uint64, MAX_ARRAYS), ("sizes", np.int64, MAX_ARRAYS), ("ends", np.int64, MAX_ARRAYS)]
)
PAIRS = np.dtype(
    [(name, np.uint64, MAX_PAIRS) for name in ("from", "to")]
    + [(name, np.int64, MAX_PAIRS) for name in ("sizes", "ends")]
)


def batches(items: Sequence[Any], max_items: int) -> Iterator[tuple[tuple[str, ...], list[Any]]]:
    """Group nonempty items (array, ...) by the dtypes of their first two entries, in batches of at most `max_items`."""
    by_dtypes: dict[tuple[str, ...], list[Any]] = {}
    for item in items:
        if item[0].size:
            by_dtypes.setdefault(dtype_names(*item[:2]), []).append(item)
    for dtypes, group in by_dtypes.items():
        for start in range(0, len(group), max_items):
            yield dtypes, group[start : start + max_items]


def table_of(dtype: Any, columns: dict[str, list[Any]], **constants: tuple[Any, ...]) -> tuple[Any, int]:
    """Return a table, which is passed by value, and the number of blocks; `constants` are the same in every step."""
    constant_table, blocks = _constant_table(dtype, **constants)
    table = constant_table.copy()
    _fill(table, columns)
    return table, blocks


@functools.lru_cache(maxsize=256)
def _constant_table(dtype: Any, sizes: tuple[int, ...], **constants: tuple[Any, ...]) -> tuple[Any, int]:
    table = np.zeros(1, dtype)
    ends = list(itertools.accumulate(-(-size // BLOCK_ELEMENTS) for size in sizes))
    _fill(table, {**constants, "sizes": sizes, "ends": ends})
    return table, ends[-1]


def _fill(table: Any, columns: dict[str, Any]) -> None:
    for name, column in columns.items():
        table[name][0, : len(column)] = column
