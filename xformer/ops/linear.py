"""Linear maps: x @ weight + bias, and several maps of the same input, split into heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.errors import ShapeError
from xformer.ops.activations import activation as activation_named
from xformer.ops.activations import relu_forward, relu_vjp
from xformer.ops.inference_weight import InferenceWeight
from xformer.ops.operation import Operation


def as_rows(x: Array) -> Any:
    """Reshape (..., features) to (rows, features): one large product is faster than a stack of small ones."""
    if x.ndim == 2:
        return x
    return array_namespace(x).reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def split_heads(rows: Array, shape: Sequence[int], heads: int) -> Array:
    """View rows (batch * length, heads * head_dim) as (batch, heads, length, head_dim); shape: (batch, length, ...)."""
    xp = array_namespace(rows)
    return xp.permute_dims(xp.reshape(rows, (*shape[:2], heads, rows.shape[1] // heads)), (0, 2, 1, 3))


def merge_heads(x: Array) -> Array:
    """Merge (batch, heads, length, head_dim) into (batch, length, heads * head_dim)."""
    batch, heads, length, head_dim = x.shape
    xp = array_namespace(x)
    return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), (batch, length, heads * head_dim))


def linear_functions(
    affine: Callable[..., Any],
    product: Callable[..., Any],
    parameter_cotangents: Callable[..., Any],
    rows_of_heads: Callable[[Any], Any] = lambda g: as_rows(merge_heads(g)),
) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Return the forward and the vjp of `linear` and of `project_heads`.

    Args:
        affine: (rows, weight, bias or None) -> rows @ weight + bias.
        product: (rows, weight, addend or None) -> rows @ weight.T + addend.
        parameter_cotangents: (rows, g_rows, weight, needs) -> cotangents of weight and bias, None for those that are
            not needed.
        rows_of_heads: (batch, heads, length, head_dim) -> (batch * length, heads * head_dim).
    """

    def forward(x: Any, weight: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
        y = affine(as_rows(x), weight, bias)
        return array_namespace(y).reshape(y, (*x.shape[:-1], weight.shape[1])), (x, weight)

    def vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
        x, weight = residuals
        g_rows = as_rows(g)
        dx = product(g_rows, weight, None) if needs[0] else None
        dx = None if dx is None else array_namespace(dx).reshape(dx, x.shape)
        return dx, *parameter_cotangents(as_rows(x), g_rows, weight, needs[1:])

    def heads_forward(x: Any, *maps: Any, heads: tuple[int, ...], save: bool) -> tuple[Any, Any]:
        rows, weights = as_rows(x), maps[::2]
        outputs = (affine(rows, weight, bias) for weight, bias in zip(weights, maps[1::2], strict=True))
        return tuple(split_heads(y, x.shape, count) for y, count in zip(outputs, heads, strict=True)), (x, weights)

    def heads_vjp(g: Any, residuals: Any, needs: Any, *, heads: tuple[int, ...]) -> tuple[Any, ...]:
        """Sum the cotangents of x over the maps; an output without a cotangent (None) contributes nothing."""
        x, weights = residuals
        rows, dx = as_rows(x), None
        dmaps: list[Any] = [None] * (2 * len(heads))
        for index, (g_heads, weight) in enumerate(zip(g, weights, strict=True)):
            if g_heads is None:
                continue
            g_rows, own = rows_of_heads(g_heads), slice(2 * index, 2 * index + 2)
            if needs[0]:
                dx = product(g_rows, weight, dx)
            dmaps[own] = parameter_cotangents(rows, g_rows, weight, needs[1:][own])
        return None if dx is None else array_namespace(dx).reshape(dx, x.shape), *dmaps

    return {"linear": (forward, vjp), "project_heads": (heads_forward, heads_vjp)}


def _affine(rows: Array, weight: Array, bias: Array | None) -> Any:
    y = rows @ weight
    return y if bias is None else y + bias


def _product(rows: Array, weight: Array, addend: Array | None) -> Any:
    y = rows @ array_namespace(rows, weight).matrix_transpose(weight)
    return y if addend is None else addend + y


def _parameter_cotangents(rows: Array, g_rows: Array, weight: Array, needs: Any) -> tuple[Any, Any]:
    xp = array_namespace(rows, g_rows)
    dweight = xp.matrix_transpose(rows) @ g_rows if needs[0] else None
    return dweight, xp.sum(g_rows, axis=0, dtype=accumulation_dtype(xp, g_rows.dtype)) if needs[1] else None


_FUNCTIONS = linear_functions(_affine, _product, _parameter_cotangents)
_forward, _vjp = _FUNCTIONS["linear"]
_SIGNATURE = (
    "x: (..., in_features) float, weight: (in_features, out_features) float, bias?: (out_features) float "
    "-> (..., out_features)"
)
_linear = Operation("linear", _SIGNATURE, _forward, _vjp, compute_in_float32=True)


def _relu_forward(x: Array, weight: Array, bias: Array | None, *, save: bool) -> tuple[Array, Any]:
    y, _ = relu_forward(_forward(x, weight, bias, save=save)[0], save=save)
    return y, (x, weight, y)


def _relu_vjp(g: Array, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight, y = residuals
    return _vjp(relu_vjp(g, y, needs)[0], (x, weight), needs)


# For backends with a kernel that computes both at once.
_linear_relu = Operation("linear_relu", _SIGNATURE, _relu_forward, _relu_vjp, compute_in_float32=True)


def linear(
    x: Array, weight: Array | InferenceWeight, bias: Array | None = None, *, activation: str | None = None
) -> Array:
    """Compute x @ weight + bias, and optionally an activation function of it.

    Args:
        x: Array of shape (..., in_features).
        weight: Array or InferenceWeight of shape (in_features, out_features).
        bias: Array of shape (out_features,), or None.
        activation: Name of an activation function, or None.

    Returns:
        Array of shape (..., out_features).

    Raises:
        ShapeError: If shapes or dtypes do not match.
        ConfigError: If the activation function is unknown.
    """
    if isinstance(weight, InferenceWeight):
        _linear.signature.check("linear", (x, weight, bias))
        rows = weight.linear(as_rows(x), bias)
        y = array_namespace(rows).reshape(rows, (*x.shape[:-1], weight.shape[1]))
    elif activation == "relu" and _linear_relu.has_kernels(x):
        return _linear_relu(x, weight, bias)
    else:
        y = _linear(x, weight, bias)
    return y if activation is None else activation_named(activation)(y)


# --- project_heads ---------------------------------------------------------------------------------------------------

Projection = tuple[Array | InferenceWeight, Array | None, int]  # weight, bias, heads


_project_heads = Operation(
    "project_heads",
    "x: (batch, length, in_features) float, {weight: (in_features, columns) float, bias?: (columns) float}* "
    "-> (batch, heads, length, head_dim)",
    *_FUNCTIONS["project_heads"],
    compute_in_float32=True,
)


def project_heads(x: Array, *projections: Projection) -> tuple[Array, ...]:
    """Apply several affine maps to the same input and split their outputs into heads.

    Vaswani et al. (2017), section 3.2.2: the queries, keys and values of multi-head attention.

    Args:
        x: Array of shape (batch, length, d_model).
        *projections: Tuples (weight, bias, heads): weight of shape (d_model, heads * head_dim), an array or a
            InferenceWeight, as all others; bias of shape (heads * head_dim,) or None; the number of heads.

    Returns:
        One array of shape (batch, heads, length, head_dim) per projection.

    Raises:
        ShapeError: If x is not 3D, its features differ from those that a weight expects, or the heads do not divide
            the features of a weight.
    """
    weights, biases, heads = zip(*projections, strict=True)
    for weight, count in zip(weights, heads, strict=True):
        shape = tuple(getattr(weight, "shape", ()))
        if len(shape) == 2 and (count < 1 or shape[1] % count):
            raise ShapeError(f"weight has shape {shape}; expected a multiple of {count} heads as its columns")
    maps = [array for weight, bias in zip(weights, biases, strict=True) for array in (weight, bias)]
    if any(isinstance(weight, InferenceWeight) for weight in weights):
        _project_heads.signature.check("project_heads", (x, *maps))
        rows = as_rows(x)
        outputs = (linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return tuple(split_heads(y, x.shape, count) for y, count in zip(outputs, heads, strict=True))
    return _project_heads(x, *maps, heads=heads)
