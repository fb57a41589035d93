"""Conversion of attention weights of other libraries into MultiHeadAttention."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, array_namespace, device
from xformer.errors import ShapeError
from xformer.layers.attention import MultiHeadAttention
from xformer.layers.initializer import Initializer
from xformer.tree import replace


def attention_from_projections(
    query: Array, key: Array, value: Array, output: Array, *, num_heads: int, biases: tuple[Array, ...] | None = None
) -> MultiHeadAttention:
    """Make an attention layer from four matrices.

    Args:
        query: Matrix (d_model, d_model), stored (in, out); the features of a head are adjacent.
        key: Matrix (d_model, num_key_value_heads * head_dim).
        value: Matrix (d_model, num_key_value_heads * head_dim).
        output: Matrix (d_model, d_model).
        num_heads: Heads of the query.
        biases: Biases of query, key, value and output; None for a layer without biases.

    Returns:
        A layer with these parameters, in their library, dtype and device.

    Raises:
        ShapeError: If the shapes do not form a layer.
        ConfigError: If num_heads does not divide d_model.
    """
    d_model = query.shape[0]
    xp = array_namespace(query, key, value, output)
    head_dim = max(1, d_model // max(1, num_heads))
    init = Initializer(xp, dtype=query.dtype, device=device(query))
    layer = MultiHeadAttention(
        d_model, num_heads, num_key_value_heads=key.shape[-1] // head_dim, bias=biases is not None, init=init
    )
    names = ("query", "key", "value", "output")
    arrays: dict[str, Any] = {
        f"{name}.weight": weight for name, weight in zip(names, (query, key, value, output), strict=True)
    }
    if biases is not None:
        arrays |= {f"{name}.bias": bias for name, bias in zip(names, biases, strict=True)}
    return replace(layer, arrays)


def join_heads(per_head: Array) -> Array:
    """Join one matrix per head, (heads, d_model, head_dim), into (d_model, heads * head_dim).

    Raises:
        ShapeError: If the input is not three-dimensional.
    """
    if len(per_head.shape) != 3:
        raise ShapeError(f"per-head matrices have shape {tuple(per_head.shape)}; expected (heads, d_model, head_dim)")
    heads, d_model, head_dim = per_head.shape
    xp = array_namespace(per_head)
    return xp.reshape(xp.permute_dims(per_head, (1, 0, 2)), (d_model, heads * head_dim))


def split_fused(fused: Array, *, key_value_features: int | None = None) -> tuple[Array, Array, Array]:
    """Split a fused projection into query, key and value.

    Args:
        fused: Matrix (d_model, d_model + 2 * key_value_features), or a bias (d_model + 2 * key_value_features,).
        key_value_features: num_key_value_heads * head_dim; default a third of the features.

    Returns:
        Query, key and value, split along the last axis.

    Raises:
        ShapeError: If the features cannot be split so.
    """
    features = fused.shape[-1]
    if key_value_features is None:
        if features % 3:
            raise ShapeError(f"a fused projection has {features} features; expected three times d_model")
        key_value_features = features // 3
    if not 0 < 2 * key_value_features < features:
        raise ShapeError(f"key_value_features is {key_value_features}; expected less than half of {features}")
    first, second = features - 2 * key_value_features, features - key_value_features
    return fused[..., :first], fused[..., first:second], fused[..., second:]
