"""Elementwise functions on CuPy, in one launch each: sums, activations, gated units and dropout."""

from __future__ import annotations

import functools
from typing import Any

from xformer.backends import is_floating
from xformer.kernels.cupy import launch
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, grid_for_elements, why_not
from xformer.ops.activations import ACTIVATIONS
from xformer.ops.operation import Kernel


def map_elements(
    kernel: str, x: Any, *arrays: Any, settings: tuple[float, ...] = (), function: tuple[str, ...] = ()
) -> Any:
    """Launch a kernel, perhaps with a template argument, on x and other arrays, which are C-contiguous."""
    x = contiguous(x)
    y = empty(x)
    template = *dtype_names(x), *function
    launch.launch(f"elementwise.{kernel}", template, *grid_for_elements(x), x, *arrays, y, x.size, *settings)
    return y


def add(x: Any, y: Any) -> Any:
    """Return x + y for C-contiguous floating arrays of one shape and dtype, else None."""
    is_contiguous = x.flags.c_contiguous and y.flags.c_contiguous
    is_supported = is_contiguous and x.dtype == y.dtype and is_floating(x.dtype) and launch.is_current_device(x)
    return map_elements("add", x, y, settings=(0,)) if is_supported else None


def activation_forward(x: Any, *, save: bool, name: str) -> tuple[Any, Any]:
    """Return an activation of x and its residual, which of relu is the result."""
    x = contiguous(x)
    y = map_elements("activation", x, function=(name,))
    return y, y if name == "relu" else x


def activation_vjp(g: Any, x: Any, needs: Any, *, name: str) -> tuple[Any, ...]:
    """Return the cotangent of x, for the residual of `activation_forward`."""
    return (map_elements("activation_vjp", g, x, function=(name,)),)


def _gated_forward(gate: Any, up: Any, *, activation: str, save: bool) -> tuple[Any, Any]:
    gate, up = contiguous(gate), contiguous(up)
    return map_elements("gated", gate, up, function=(activation,)), (gate, up)


def _gated_vjp(g: Any, residuals: Any, needs: Any, *, activation: str) -> tuple[Any, ...]:
    gate, _ = residuals
    arrays = contiguous(g), *residuals, empty(gate), empty(gate)
    template = *dtype_names(gate), activation
    launch.launch("elementwise.gated_vjp", template, *grid_for_elements(gate), *arrays, gate.size)
    return arrays[3:]


def _dropout_forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    mask = contiguous(mask)
    return map_elements("dropout", x, mask, settings=(1.0 / keep_probability,)), mask


def _dropout_vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return map_elements("dropout", g, mask, settings=(1.0 / keep_probability,)), None


_FUNCTIONS: dict[str, tuple[Any, Any]] = {
    **{
        name: (functools.partial(activation_forward, name=name), functools.partial(activation_vjp, name=name))
        for name in ACTIVATIONS
    },
    "gated": (_gated_forward, _gated_vjp),
    "dropout": (_dropout_forward, _dropout_vjp),
}
KERNELS = [
    Kernel(f"cupy.{name}", name, "cupy", *functions, dtypes=FLOATS, why_not=why_not)
    for name, functions in _FUNCTIONS.items()
]
