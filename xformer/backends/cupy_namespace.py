"""The standard on CuPy: array_api_compat's namespace, but for what CuPy 14.2 does to bfloat16, `clip` and `empty`.

Its `where` makes float32 of it, and its `matmul` of more than two axes refuses it. `a @ b` of plain arrays goes past
any namespace: stacks of matrices are multiplied by `xp.matmul`.
"""

from __future__ import annotations

from typing import Any

from array_api_compat import cupy as _standard
from array_api_compat.cupy import *  # noqa: F403  (`max`, `any` and others are CuPy's below)


def _is_bfloat16(x: Any) -> bool:
    return hasattr(x, "dtype") and x.dtype.name == "bfloat16"


def where(condition: Any, x1: Any, x2: Any, /) -> Any:
    """Elements of x1 where the condition holds, else of x2; numbers take the dtype of the array."""
    chosen = _standard.where(condition, x1, x2)
    narrow, other = (x1, x2) if _is_bfloat16(x1) else (x2, x1)
    if _is_bfloat16(narrow) and getattr(other, "dtype", narrow.dtype) == narrow.dtype:
        return chosen.astype(narrow.dtype, copy=False)
    return chosen


def matmul(x1: Any, x2: Any, /) -> Any:
    """The product of matrices (..., m, k) and (..., k, n); stacks of bfloat16 are upcast, multiplied, rounded once."""
    if (x1.ndim > 2 or x2.ndim > 2) and _is_bfloat16(x1) and _is_bfloat16(x2):
        return _standard.matmul(x1.astype("float32"), x2.astype("float32")).astype(x1.dtype)
    return _standard.matmul(x1, x2)


operator_matmul = matmul  # what `@` of traced arrays does


def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """x between bounds, in its dtype; array_api_compat's assigns by a mask, which waits for the GPU."""
    dtype = x.dtype
    x = x if min is None else _standard.maximum(x, min)
    x = x if max is None else _standard.minimum(x, max)
    return x.astype(dtype, copy=False)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """A new array; a training step asks for more than a thousand, and this takes half the time."""
    if device is not None:
        return _standard.empty(shape, dtype=dtype, device=device)
    return _standard.ndarray(shape, float if dtype is None else dtype)
