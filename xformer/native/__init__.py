"""The native library: compiled kernels for arrays of NumPy, and programs of their calls. It is optional."""

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
    zeros,
)
from xformer.native.reproducible import require_reproducible, use_reproducible_algorithms

__all__ = [
    "CACHE_LINE", "WHY_NOT", "Program", "aligned_empty", "call", "can_copy", "contiguous", "has_fused_products",
    "is_available", "is_reproducible", "level", "record", "require_reproducible", "use_reproducible_algorithms",
    "zeros",
]  # fmt: skip
