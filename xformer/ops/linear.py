"""Linear map: x @ weight + bias."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.errors import ShapeError
from xformer.kernels import registry
from xformer.ops.activations import activation as activation_named
from xformer.ops.activations import relu_forward, relu_vjp
from xformer.ops.operation import Operation
from xformer.ops.quantized import QuantizedWeight, quantized_linear


def as_rows(x: Array) -> Any:
    """Reshape (..., features) to (rows, features): one large product is faster than a stack of small ones."""
    if x.ndim == 2:
        return x
    return array_namespace(x).reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _forward(x: Array, weight: Array, bias: Array | None, *, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x, weight)
    y = as_rows(x) @ weight
    y = y if bias is None else y + bias
    return xp.reshape(y, (*x.shape[:-1], weight.shape[1])), (x, weight)


def _vjp(g: Array, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight = residuals
    xp = array_namespace(g, x, weight)
    g_rows = as_rows(g)
    dx = xp.reshape(g_rows @ xp.matrix_transpose(weight), x.shape) if needs[0] else None
    dweight = xp.matrix_transpose(as_rows(x)) @ g_rows if needs[1] else None
    dbias = xp.sum(g_rows, axis=0, dtype=accumulation_dtype(xp, g.dtype)) if needs[2] else None
    return dx, dweight, dbias


_operation = Operation("linear", _forward, _vjp, compute_in_float32=True)


def _relu_forward(x: Array, weight: Array, bias: Array | None, *, save: bool) -> tuple[Array, Any]:
    y, _ = relu_forward(_forward(x, weight, bias, save=save)[0], save=save)
    return y, (x, weight, y)


def _relu_vjp(g: Array, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight, y = residuals
    return _vjp(relu_vjp(g, y, needs)[0], (x, weight), needs)


# For backends with a kernel that computes both at once.
_with_relu = Operation("linear_relu", _relu_forward, _relu_vjp, compute_in_float32=True)


def linear(
    x: Array, weight: Array | QuantizedWeight, bias: Array | None = None, *, activation: str | None = None
) -> Array:
    """Compute x @ weight + bias, and optionally an activation function of it.

    Args:
        x: Array of shape (..., in_features).
        weight: Array or QuantizedWeight of shape (in_features, out_features).
        bias: Array of shape (out_features,), or None.
        activation: Name of an activation function, or None.

    Returns:
        Array of shape (..., out_features).

    Raises:
        ShapeError: If the features of x are not those that the weight expects.
        ConfigError: If the activation function is unknown.
    """
    check_features(x, weight)
    if isinstance(weight, QuantizedWeight):
        rows = quantized_linear(as_rows(x), weight, bias)
        y = array_namespace(rows).reshape(rows, (*x.shape[:-1], weight.shape[1]))
        return y if activation is None else activation_named(activation)(y)
    if activation == "relu" and registry.has_kernel("linear_relu", x):
        return _with_relu(x, weight, bias)
    y = _operation(x, weight, bias)
    return y if activation is None else activation_named(activation)(y)


def check_features(x: Array, weight: Array | QuantizedWeight) -> None:
    """Raise ShapeError unless x has the features that the weight expects."""
    if x.shape[-1] != weight.shape[0]:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}; expected (..., {weight.shape[0]}) for a weight of shape "
            f"{tuple(weight.shape)}, stored (in_features, out_features)"
        )
