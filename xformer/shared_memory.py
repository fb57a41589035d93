"""NumPy arrays in memory that several processes share."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from typing import Any

ArraySpec = tuple[tuple[int, ...], Any]  # shape and dtype

_ALIGNMENT = 64  # bytes of a cache line


def can_share_memory() -> bool:
    """Tell whether `SharedArrays` works here: it needs anonymous files in memory, which Linux has."""
    return hasattr(os, "memfd_create")


class SharedArrays:
    """NumPy arrays that several processes see: one makes them, others open them by the file descriptor they inherit.

    specs: shape and dtype of each array. descriptor: None makes new memory, filled with zeros.
    """

    def __init__(self, specs: Sequence[ArraySpec], descriptor: int | None = None) -> None:
        mmap, numpy = importlib.import_module("mmap"), importlib.import_module("numpy")
        counts = [math.prod(shape) for shape, _ in specs]
        starts = [0]
        for count, (_, dtype) in zip(counts, specs, strict=True):
            starts.append(starts[-1] + -(-count * numpy.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT)
        size = max(starts[-1], 1)
        if descriptor is None:
            descriptor = os.memfd_create("xformer")
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        memory = mmap.mmap(descriptor, size)
        self.arrays: list[Any] = [
            numpy.frombuffer(memory, dtype, count, start).reshape(shape)
            for (shape, dtype), count, start in zip(specs, counts, starts[:-1], strict=True)
        ]

    def close(self) -> None:
        """Give the descriptor back; the memory itself goes with the last array, of whichever process."""
        os.close(self.descriptor)
