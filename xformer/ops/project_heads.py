"""Queries, keys and values: several affine maps of the same input, split into heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.errors import ShapeError
from xformer.ops.linear import as_rows, check_features
from xformer.ops.operation import Operation
from xformer.ops.quantized import QuantizedWeight, quantized_linear

Projection = tuple[Array | QuantizedWeight, Array | None, int]  # weight, bias, heads


def split_heads(rows: Array, shape: Sequence[int], heads: int) -> Array:
    """View rows (batch * length, heads * head_dim) as (batch, heads, length, head_dim); shape: (batch, length, ...)."""
    xp = array_namespace(rows)
    return xp.permute_dims(xp.reshape(rows, (*shape[:2], heads, rows.shape[1] // heads)), (0, 2, 1, 3))


def merge_heads(x: Array) -> Array:
    """Merge (batch, heads, length, head_dim) into (batch, length, heads * head_dim)."""
    batch, heads, length, head_dim = x.shape
    xp = array_namespace(x)
    return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), (batch, length, heads * head_dim))


def _forward(x: Array, *maps: Array | None, heads: tuple[int, ...], save: bool) -> tuple[Any, Any]:
    weights, biases = maps[: len(heads)], maps[len(heads) :]
    rows, outputs = as_rows(x), []
    for weight, bias, count in zip(weights, biases, heads, strict=True):
        y = rows @ weight if bias is None else rows @ weight + bias
        outputs.append(split_heads(y, x.shape, count))
    return tuple(outputs), (x, weights)


def _vjp(g: Sequence[Array | None], residuals: Any, needs: Any, *, heads: tuple[int, ...]) -> tuple[Any, ...]:
    """Sum the cotangents of x over the maps; an output without a cotangent (None) contributes nothing."""
    x, weights = residuals
    xp = array_namespace(x, *weights, *g)
    dx: Array | None = None
    dweights: list[Array | None] = []
    dbiases: list[Array | None] = []
    for g_heads, weight in zip(g, weights, strict=True):
        if g_heads is None:
            dweights.append(None)
            dbiases.append(None)
            continue
        g_rows = as_rows(merge_heads(g_heads))
        dx_rows = g_rows @ xp.matrix_transpose(weight)
        dx = dx_rows if dx is None else dx + dx_rows
        dweights.append(xp.matrix_transpose(as_rows(x)) @ g_rows)
        dbiases.append(xp.sum(g_rows, axis=0, dtype=accumulation_dtype(xp, g_rows.dtype)))
    return (None if dx is None else xp.reshape(dx, x.shape), *dweights, *dbiases)


_operation = Operation("project_heads", _forward, _vjp, compute_in_float32=True)


def project_heads(x: Array, *projections: Projection) -> tuple[Array, ...]:
    """Apply several affine maps to the same input and split their outputs into heads.

    Vaswani et al. (2017), section 3.2.2: the queries, keys and values of multi-head attention.

    Args:
        x: Array of shape (batch, length, d_model).
        *projections: Tuples (weight, bias, heads): weight of shape (d_model, heads * head_dim), an array or a
            QuantizedWeight, as all others; bias of shape (heads * head_dim,) or None; the number of heads.

    Returns:
        One array of shape (batch, heads, length, head_dim) per projection.

    Raises:
        ShapeError: If x is not 3D, its features differ from those that a weight expects, or the heads do not divide
            the features of a weight.
    """
    if len(x.shape) != 3:
        raise ShapeError(f"x has shape {tuple(x.shape)}; expected (batch, length, d_model)")
    weights, biases, heads = zip(*projections, strict=True)
    for weight, count in zip(weights, heads, strict=True):
        check_features(x, weight)
        if weight.shape[1] % count:
            raise ShapeError(
                f"weight has shape {tuple(weight.shape)}; expected a multiple of {count} heads as its columns"
            )
    if all(isinstance(weight, QuantizedWeight) for weight in weights):
        rows = as_rows(x)
        outputs = (quantized_linear(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True))
        return tuple(split_heads(y, x.shape, count) for y, count in zip(outputs, heads, strict=True))
    return _operation(x, *weights, *biases, heads=heads)
