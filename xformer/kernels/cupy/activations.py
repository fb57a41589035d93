"""ReLU and GELU on CuPy."""

from __future__ import annotations

from typing import Any

from xformer.kernels.cupy.arrays import FLOATS, contiguous, why_not
from xformer.kernels.cupy.elementwise import map_elements
from xformer.ops.operation import Kernel


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


KERNELS = [
    Kernel("cupy.relu", "relu", "cupy", relu_forward, relu_vjp, dtypes=FLOATS, why_not=why_not),
    Kernel("cupy.gelu", "gelu", "cupy", _gelu_forward, _gelu_vjp, dtypes=FLOATS, why_not=why_not),
]
