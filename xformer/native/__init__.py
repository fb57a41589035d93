"""The native library: compiled kernels for arrays of NumPy, and programs of their calls. It is optional."""

from xformer.native.library import (
    CACHE_LINE,
    WHY_NOT,
    Program,
    aligned_empty,
    call,
    can_copy,
    contiguous,
    is_available,
    level,
    record,
    zeros,
)

__all__ = [
    "CACHE_LINE", "WHY_NOT", "Program", "aligned_empty", "call", "can_copy", "contiguous", "is_available", "level",
    "record", "zeros",
]  # fmt: skip
