"""The native library: compiled kernels for arrays of NumPy, and programs of their calls. It is optional."""

from xformer.backends import array_namespace
from xformer.native.library import (
    CACHE_LINE,
    WHY_NOT,
    Program,
    aligned_empty,
    call,
    can_copy,
    contiguous,
    has_fused_products,
    is_available,
    is_reproducible,
    level,
    record,
    release_memory,
    zeros,
)
from xformer.native.reproducible import use_reproducible_algorithms, use_reproducible_on

__all__ = [
    "CACHE_LINE", "WHY_NOT", "Program", "aligned_empty", "array_namespace", "call", "can_copy", "contiguous",
    "has_fused_products", "is_available", "is_reproducible", "level", "record", "release_memory",
    "use_reproducible_algorithms", "use_reproducible_on", "zeros",
]  # fmt: skip
