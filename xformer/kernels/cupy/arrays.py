"""Dtypes, devices and memory of the arrays of CuPy kernels."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import accumulation_dtype, array_namespace, dtype_name, is_half_precision
from xformer.kernels.cupy import launch as cuda_launch

FLOATS = ("float16", "bfloat16", "float32", "float64")


def why_not(x: Any, *arrays: Any, **options: Any) -> str | None:
    """Return why kernels do not take arrays on the device of x, or None."""
    return None if cuda_launch.is_current_device(x) else f"arrays are on {x.device}, which is not the current device"


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
