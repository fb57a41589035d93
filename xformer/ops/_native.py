"""Defaults of the kernels that call the native library.

Such a kernel gets plain arrays. It may allocate by `np.empty`, make views, and call `native.call`, `native.contiguous`
and `native.zeros`, but no other function that computes: `jit` records these calls, and repeats them with other memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from xformer import native
from xformer.ops.operation import Kernel


def why_not(*arrays: Any, save: bool = False, **options: Any) -> str | None:
    """Return why native kernels take no such arrays, or None."""
    for array in arrays:
        if array is None:
            continue
        if type(array) is not np.ndarray:
            return f"an array is a {type(array).__name__}"
        if not array.flags.aligned:
            return "an array is not aligned in memory"
    return None


def native_kernel(
    operation: str, forward: Callable[..., Any], vjp: Callable[..., Any] | None, **options: Any
) -> Kernel:
    """Return a kernel for float32 arrays; the options are fields of `Kernel`."""
    defaults: dict[str, Any] = {
        "dtypes": ("float32",),
        "why_not": why_not,
        "disabled_by": "no-native",
        "is_recordable": True,
    }
    return Kernel(f"native.{operation}", operation, "numpy", forward, vjp, **(defaults | options))


def rows_of(x: Any) -> Any:
    """Return an array (..., features) as a contiguous matrix (rows, features)."""
    return native.contiguous(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])
