"""Dtypes, devices and memory of the arrays of CuPy kernels."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import accumulation_dtype, array_namespace, dtype_name, is_floating, is_half_precision
from xformer.kernels.cupy import launch as cuda_launch


def unsupported_reason(x: Any) -> str | None:
    """Return why kernels do not take x (its dtype, or another device), or None."""
    if not is_floating(x.dtype):
        return f"dtype {dtype_name(x.dtype)} (kernels take floating dtypes)"
    return None if cuda_launch.is_current_device(x) else f"arrays are on {x.device}, which is not the current device"


def supports_floats(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """Accept arrays of one floating dtype, except for masks and ids."""
    if reason := unsupported_reason(arrays[0]):
        return reason
    dtype = arrays[0].dtype
    for array in arrays:
        if array is not None and array.dtype != dtype and is_floating(array.dtype):
            return f"mixed dtypes {dtype_name(dtype)} and {dtype_name(array.dtype)}"
    return None


def is_compatible_dtype(parameter: Any, x: Any) -> bool:
    """Return whether a parameter has the dtype of x, or float32 if x has 16 bits."""
    dtype, x_dtype = dtype_name(parameter.dtype), dtype_name(x.dtype)
    return dtype == x_dtype or (dtype == "float32" and is_half_precision(x.dtype))


def dtype_names(*arrays: Any) -> tuple[str, ...]:
    """Return the names of the dtypes, which are template arguments of a launch."""
    return tuple(dtype_name(array.dtype) for array in arrays)


def compute_dtype(x: Any) -> Any:
    """Return the dtype in which kernels compute: float64 for float64, else float32."""
    return accumulation_dtype(array_namespace(x), x.dtype)


def contiguous(x: Any, dtype: Any = None) -> Any:
    """Return x in C order, and in `dtype` if given; x itself if possible."""
    if dtype is not None and x.dtype != dtype:
        x = array_namespace(x).astype(x, dtype)
    return x if x.flags.c_contiguous else array_namespace(x).ascontiguousarray(x)


def empty(like: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """Allocate an array in C order, by default of the shape and dtype of `like`."""
    xp = array_namespace(like)
    return xp.empty(like.shape if shape is None else shape, dtype=like.dtype if dtype is None else dtype)


def row_count(x: Any) -> int:
    """Return the number of rows along the last axis."""
    return math.prod(x.shape[:-1])
