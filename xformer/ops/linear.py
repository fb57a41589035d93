"""Linear maps: x @ weight + bias, and several maps of the same input, split into heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.errors import ShapeError
from xformer.ops.activations import Activation, relu_forward, relu_vjp
from xformer.ops.activations import activation as activation_named
from xformer.ops.operation import Operation
from xformer.ops.weights import InferenceWeight


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


def affine_functions(
    affine: Callable[..., Any],
    product: Callable[..., Any],
    parameter_cotangents: Callable[..., Any],
    relu_vjp: Callable[..., Any] = relu_vjp,
    rows_of: Callable[..., Any] = lambda x, shape: x if x.ndim == 2 else array_namespace(x).reshape(x, shape),
    cotangent_rows_of: Callable[..., Any] | None = None,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the forward and the vjp of `linear` and `project_heads`, which are one: affine maps of the same input.

    Args:
        affine: (rows, weight, bias or None, relu) -> rows @ weight + bias, or with relu its positive part.
        product: (rows, weight, addend or None) -> rows @ weight.T + addend.
        parameter_cotangents: (rows, g_rows, weight, needs) -> cotangents of weight and bias, None for those that are
            not needed.
        relu_vjp: The vjp of `relu`.
        rows_of: (array, shape) -> a matrix of this shape with the elements of the array.
        cotangent_rows_of: The same for cotangents; default `rows_of`.
    """
    cotangent_rows_of = cotangent_rows_of or rows_of

    def forward(x: Any, *maps: Any, heads: Sequence[int] = (), relu: bool = False, save: bool) -> tuple[Any, Any]:
        xp, rows = array_namespace(x, *maps), rows_of(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        outputs = []
        for index in range(len(maps) // 2):
            y = affine(rows, maps[2 * index], maps[2 * index + 1], relu)
            if not heads:
                y = xp.reshape(y, (*x.shape[:-1], y.shape[1]))
                return y, (x, maps[::2], y if relu else None)
            y = xp.reshape(y, (*x.shape[:2], heads[index], y.shape[1] // heads[index]))
            outputs.append(xp.permute_dims(y, (0, 2, 1, 3)))
        return tuple(outputs), (x, maps[::2], None)

    def vjp(g: Any, residuals: Any, needs: Any, *, heads: Sequence[int] = (), relu: bool = False) -> tuple[Any, ...]:
        """Sum the cotangents of x over the maps; an output without a cotangent (None) contributes nothing."""
        x, weights, y = residuals
        rows, dx = rows_of(x, (math.prod(x.shape[:-1]), x.shape[-1])), None
        dmaps: list[Any] = [None] * (2 * len(weights))
        for index, (each, weight) in enumerate(zip(g if heads else [g], weights, strict=True)):
            if each is None:
                continue
            each = relu_vjp(each, y, needs)[0] if relu else each
            each = array_namespace(each).permute_dims(each, (0, 2, 1, 3)) if heads else each
            g_rows, own = cotangent_rows_of(each, (rows.shape[0], weight.shape[1])), slice(2 * index, 2 * index + 2)
            if needs[0]:
                dx = product(g_rows, weight, dx)
            dmaps[own] = parameter_cotangents(rows, g_rows, weight, needs[1:][own])
        return None if dx is None else array_namespace(dx).reshape(dx, x.shape), *dmaps

    return forward, vjp


def _affine(rows: Array, weight: Array, bias: Array | None, relu: bool) -> Any:
    y = rows @ weight
    y = y if bias is None else y + bias
    return relu_forward(y, save=False)[0] if relu else y


def _product(rows: Array, weight: Array, addend: Array | None) -> Any:
    y = rows @ array_namespace(rows, weight).matrix_transpose(weight)
    return y if addend is None else addend + y


def _parameter_cotangents(rows: Array, g_rows: Array, weight: Array, needs: Any) -> tuple[Any, Any]:
    xp = array_namespace(rows, g_rows)
    dweight = xp.matrix_transpose(rows) @ g_rows if needs[0] else None
    return dweight, xp.sum(g_rows, axis=0, dtype=accumulation_dtype(xp, g_rows.dtype)) if needs[1] else None


_FUNCTIONS = affine_functions(_affine, _product, _parameter_cotangents)
_linear = Operation(
    "linear",
    "x: (..., in_features) float, weight: (in_features, out_features) float, bias?: (out_features) float "
    "-> (..., out_features)",
    *_FUNCTIONS,
    compute_in_float32=True,
)


def linear(
    x: Array, weight: Array | InferenceWeight, bias: Array | None = None, *, activation: Activation | None = None
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
        _linear.check(x, weight, bias)
        rows = weight.linear(as_rows(x), bias)
        y = array_namespace(rows).reshape(rows, (*x.shape[:-1], weight.shape[1]))
    elif activation == "relu":
        return _linear(x, weight, bias, relu=True)
    else:
        y = _linear(x, weight, bias)
    return y if activation is None else activation_named(activation)(y)


# --- project_heads ---------------------------------------------------------------------------------------------------

Projection = tuple[Array | InferenceWeight, Array | None, int]  # weight, bias, heads


_project_heads = Operation(
    "project_heads",
    "x: (batch, length, in_features) float, {weight: (in_features, columns) float, bias?: (columns) float}* "
    "-> (batch, heads, length, head_dim)",
    *_FUNCTIONS,
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
    maps: list[Any] = []
    heads, are_arrays = [], True
    for weight, bias, count in projections:
        shape = tuple(getattr(weight, "shape", ()))
        if len(shape) == 2 and (count < 1 or shape[1] % count):
            raise ShapeError(f"weight has shape {shape}; expected a multiple of {count} heads as its columns")
        maps += weight, bias
        heads.append(count)
        are_arrays = are_arrays and not isinstance(weight, InferenceWeight)
    if are_arrays:
        return _project_heads(x, *maps, heads=tuple(heads))
    _project_heads.check(x, *maps)
    rows = as_rows(x)
    return tuple(split_heads(linear(rows, weight, bias), x.shape, count) for weight, bias, count in projections)
