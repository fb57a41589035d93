"""Dtypes of the arrays of torch kernels."""

from __future__ import annotations

from typing import Any

import torch


def supports_floats(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Accept floating arrays of one dtype, with masks and ids."""
    dtypes = {array.dtype for array in arrays if array is not None and array.is_floating_point()}
    return f"mixed dtypes {' and '.join(sorted(map(str, dtypes)))}" if len(dtypes) > 1 else None


def supports_wide_floats(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Accept floating arrays that are all float32 or all float64, with masks and ids."""
    for array in arrays:
        if array is not None and array.dtype in (torch.bfloat16, torch.float16):
            return f"dtype {array.dtype} (the kernel takes float32 and float64)"
    return supports_floats(arrays, static)


def is_differentiated_by_torch(*arrays: Any) -> bool:
    """Return whether torch's autograd records operations on the arrays."""
    return torch.is_grad_enabled() and any(array is not None and array.requires_grad for array in arrays)
