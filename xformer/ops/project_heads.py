"""Queries, keys and values: several affine maps of the same rows, each cut into heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.errors import ShapeError
from xformer.ops.linear import as_rows, check_features
from xformer.ops.operation import Operation

Projection = tuple[Array, Array | None, int]  # weight, bias, heads


def _forward(x: Array, *maps: Array | None, heads: tuple[int, ...], save: bool) -> tuple[Any, Any]:
    xp = array_namespace(x, *maps)
    weights, biases = maps[: len(heads)], maps[len(heads) :]
    rows, outputs = as_rows(x), []
    for weight, bias, count in zip(weights, biases, heads, strict=True):
        y = rows @ weight if bias is None else rows @ weight + bias
        y = xp.reshape(y, (*x.shape[:2], count, y.shape[1] // count))
        outputs.append(xp.permute_dims(y, (0, 2, 1, 3)))
    return tuple(outputs), (x, weights)


def _vjp(g: Sequence[Array | None], residuals: Any, needs: Any, *, heads: tuple[int, ...]) -> tuple[Any, ...]:
    """The cotangents of x add up; an output that nothing depends on has none."""
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
        g_rows = xp.reshape(xp.permute_dims(g_heads, (0, 2, 1, 3)), (math.prod(x.shape[:2]), weight.shape[1]))
        more = g_rows @ xp.matrix_transpose(weight)
        dx = more if dx is None else dx + more
        dweights.append(xp.matrix_transpose(as_rows(x)) @ g_rows)
        dbiases.append(xp.sum(g_rows, axis=0, dtype=accumulation_dtype(xp, g_rows.dtype)))
    return (None if dx is None else xp.reshape(dx, x.shape), *dweights, *dbiases)


_operation = Operation(Implementation("project_heads", _forward, _vjp), compute_in_float32=True)


def project_heads(x: Array, *projections: Projection) -> tuple[Array, ...]:
    """Multiply rows by each matrix, add its bias, and cut the features into heads.

    x: (batch, length, d_model); a projection: weight (d_model, heads * head_dim), bias (heads * head_dim,) or None, and
    the number of heads. Returns one array a projection: (batch, heads, length, head_dim).

    Raises ShapeError when x has another rank, or other features than a weight expects.
    """
    if len(x.shape) != 3:
        raise ShapeError(f"x and memory must have shape (batch, length, d_model); one has {tuple(x.shape)}")
    weights, biases, heads = zip(*projections, strict=True)
    for weight, count in zip(weights, heads, strict=True):
        check_features(x, weight)
        if weight.shape[1] % count:
            raise ShapeError(f"a weight of shape {tuple(weight.shape)} is cut into {count} heads; they must divide it")
    return _operation(x, *weights, *biases, heads=heads)  # type: ignore[no-any-return]
