"""Elementwise functions on CuPy, in one launch each: sums, ReLU, GELU and dropout."""

from __future__ import annotations

from typing import Any

from xformer.backends import is_floating
from xformer.kernels.cupy import launch
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, grid_for_elements, why_not
from xformer.ops.operation import Kernel


def map_elements(kernel: str, x: Any, *arrays: Any, settings: tuple[float, ...] = ()) -> Any:
    """Launch an elementwise function of x and of more arrays, which are C-contiguous."""
    x = contiguous(x)
    y = empty(x)
    launch.launch(f"elementwise.{kernel}", dtype_names(x), *grid_for_elements(x), x, *arrays, y, x.size, *settings)
    return y


def add(x: Any, y: Any) -> Any:
    """Return x + y for C-contiguous floating arrays of one shape and dtype, else None."""
    is_supported = x.dtype == y.dtype and is_floating(x.dtype) and launch.is_current_device(x)
    return map_elements("add", x, y) if is_supported and x.flags.c_contiguous and y.flags.c_contiguous else None


def relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    """Return max(x, 0), which is also the residual."""
    y = map_elements("relu", x)
    return y, y


def relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    """Return g where y = relu(x) is positive, else zero."""
    return (map_elements("relu_vjp", g, y),)


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    x = contiguous(x)
    return map_elements("gelu", x), x


def _gelu_vjp(g: Any, x: Any, needs: Any) -> tuple[Any, ...]:
    return (map_elements("gelu_vjp", g, x),)


def _dropout_forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    mask = contiguous(mask)
    return map_elements("dropout", x, mask, settings=(1.0 / keep_probability,)), mask


def _dropout_vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return map_elements("dropout", g, mask, settings=(1.0 / keep_probability,)), None


KERNELS = [
    Kernel("cupy.relu", "relu", "cupy", relu_forward, relu_vjp, dtypes=FLOATS, why_not=why_not),
    Kernel("cupy.gelu", "gelu", "cupy", _gelu_forward, _gelu_vjp, dtypes=FLOATS, why_not=why_not),
    Kernel("cupy.dropout", "dropout", "cupy", _dropout_forward, _dropout_vjp, dtypes=FLOATS, why_not=why_not),
]
