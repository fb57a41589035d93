"""array_api_compat's namespace of CuPy, with `add`, `where`, `matmul`, `clip` and `empty` replaced.

In CuPy 14.2 `where` converts bfloat16 to float32, and `matmul` rejects stacks of bfloat16 matrices. `a @ b` of plain
arrays bypasses every namespace, so stacks of matrices are multiplied by `xp.matmul`.
"""

from __future__ import annotations

import importlib
from typing import Any

from array_api_compat import cupy as _standard
from array_api_compat.cupy import *  # noqa: F403  (`max`, `any` and others are CuPy's below)

from xformer.environment import env_value
from xformer.errors import BackendError

try:
    _standard.cuda.runtime.getDeviceCount()
except RuntimeError as error:
    raise BackendError(f"no NVIDIA GPU or driver was found ({error}); use xp=numpy") from error
_MIN_LARGE = 2**16  # elements


def _is_bfloat16(x: Any) -> bool:
    return hasattr(x, "dtype") and x.dtype.name == "bfloat16"


def add(x1: Any, x2: Any, /) -> Any:
    """Add arrays; large ones by a kernel whose threads move 16 bytes at a time, where those of CuPy move an element."""
    is_large = getattr(x1, "size", 0) >= _MIN_LARGE and x1.shape == getattr(x2, "shape", None)
    if is_large and env_value("XFORMER_KERNELS") != "portable":
        total = importlib.import_module("xformer.kernels.cupy.elementwise").add(x1, x2)
        if total is not None:
            return total
    return _standard.add(x1, x2)


operator_add = add  # what `+` of traced arrays does


def where(condition: Any, x1: Any, x2: Any, /) -> Any:
    """Select elements of x1 where the condition holds, else of x2; Python numbers take the dtype of the array."""
    result = _standard.where(condition, x1, x2)
    array, other = (x1, x2) if _is_bfloat16(x1) else (x2, x1)
    if _is_bfloat16(array) and getattr(other, "dtype", array.dtype) == array.dtype:
        return result.astype(array.dtype, copy=False)
    return result


def matmul(x1: Any, x2: Any, /) -> Any:
    """Multiply matrices (..., m, k) and (..., k, n); stacks of bfloat16 are upcast, multiplied and rounded once."""
    if (x1.ndim > 2 or x2.ndim > 2) and _is_bfloat16(x1) and _is_bfloat16(x2):
        return _standard.matmul(x1.astype("float32"), x2.astype("float32")).astype(x1.dtype)
    return _standard.matmul(x1, x2)


operator_matmul = matmul  # what `@` of traced arrays does


def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """Clamp x in its own dtype; array_api_compat assigns through a mask, which waits for the GPU."""
    dtype = x.dtype
    x = x if min is None else _standard.maximum(x, min)
    x = x if max is None else _standard.minimum(x, max)
    return x.astype(dtype, copy=False)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Allocate an array in half the time of `cupy.empty`; a training step allocates more than a thousand."""
    if device is not None:
        return _standard.empty(shape, dtype=dtype, device=device)
    return _standard.ndarray(shape, float if dtype is None else dtype)
