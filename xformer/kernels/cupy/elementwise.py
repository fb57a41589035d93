"""Elementwise functions on CuPy, in one launch each."""

from __future__ import annotations

from typing import Any

from xformer.backends import is_floating
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import contiguous, dtype_names, empty
from xformer.kernels.cupy.grid import grid_for_elements


def map_elements(kernel: str, x: Any, *arrays: Any, settings: tuple[float, ...] = ()) -> Any:
    """Launch an elementwise function of x and of more arrays, which are C-contiguous."""
    x = contiguous(x)
    y = empty(x)
    cuda_launch.launch(f"elementwise.{kernel}", dtype_names(x), *grid_for_elements(x), x, *arrays, y, x.size, *settings)
    return y


def add(x: Any, y: Any) -> Any:
    """Return x + y for C-contiguous floating arrays of one shape and dtype, else None."""
    is_supported = x.dtype == y.dtype and is_floating(x.dtype) and cuda_launch.is_current_device(x)
    return map_elements("add", x, y) if is_supported and x.flags.c_contiguous and y.flags.c_contiguous else None
