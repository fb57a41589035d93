"""Attention weights as other systems store them, brought into MultiHeadAttention's four matrices."""

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
    """A layer of given matrices, stored (in, out).

    query, output: (d_model, d_model); key, value: (d_model, key/value heads * head_dim), the features of a head next
    to each other. biases: of query, key, value and output; None: the layer has none.

    Raises ShapeError when the shapes make no layer, ConfigError when the heads do not divide d_model.
    """
    d_model = query.shape[0]
    xp = array_namespace(query, key, value, output)
    head_dim = max(1, d_model // max(1, num_heads))
    init = Initializer(xp, dtype=query.dtype, device=device(query))
    layer = MultiHeadAttention(
        d_model, num_heads, num_key_value_heads=key.shape[-1] // head_dim, bias=biases is not None, init=init
    )
    arrays: dict[str, Any] = {}
    for place, (name, weight) in enumerate({"query": query, "key": key, "value": value, "output": output}.items()):
        arrays[f"{name}.weight"] = weight
        if biases is not None:
            arrays[f"{name}.bias"] = biases[place]
    return replace(layer, arrays)  # type: ignore[no-any-return]


def join_heads(per_head: Array) -> Array:
    """One matrix a head, (heads, d_model, head_dim), as one matrix of all: (d_model, heads * head_dim)."""
    if len(per_head.shape) != 3:
        raise ShapeError(f"per-head matrices have shape {tuple(per_head.shape)}; expected (heads, d_model, head_dim)")
    heads, d_model, head_dim = per_head.shape
    xp = array_namespace(per_head)
    return xp.reshape(xp.permute_dims(per_head, (1, 0, 2)), (d_model, heads * head_dim))


def split_fused(fused: Array, *, key_value_features: int | None = None) -> tuple[Array, Array, Array]:
    """A fused matrix (d_model, d_model + 2 * key_value_features), or bias without the first axis, as query, key, value.

    key_value_features: key/value heads * head_dim; default a third of all, for as many heads as the query has.
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
