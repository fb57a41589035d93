"""How xformer uses MLX, the array library of Apple, which also runs on the CPUs of Linux and on CUDA."""

from __future__ import annotations

from mlx import core

from xformer.backends.array_types import NativeArray as Array
from xformer.backends.library import Library


class MlxLibrary(Library, library="mlx"):
    """How xformer uses MLX."""

    def erf(self, x: Array) -> Array:
        """Compute erf by MLX."""
        return core.erf(x)

    def scatter_add(self, target: Array, indices: Array, updates: Array) -> Array:
        """Add by `at[].add`."""
        return target.at[indices].add(updates)

    def share_memory(self, x: Array, y: Array) -> bool:
        """Compare the objects: a write into an array changes no slice of it."""
        return x is y
