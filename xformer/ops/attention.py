"""Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1)."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import (
    Array,
    Device,
    Namespace,
    accumulation_dtype,
    array_namespace,
    check_same_device,
    device,
    dtype_name,
    extra,
)
from xformer.errors import ShapeError
from xformer.kernels import registry
from xformer.ops.dropout import apply_dropout
from xformer.ops.operation import Operation
from xformer.ops.softmax import softmax, softmax_cotangent


def causal_mask(xp: Namespace, queries: int, keys: int, device: Device = None) -> Array:
    """Return a mask (queries, keys), True where a key is not later than the query; the last query sees all keys."""
    query = xp.reshape(xp.arange(keys - queries, keys, device=device), (queries, 1))
    key = xp.reshape(xp.arange(keys, device=device), (1, keys))
    return key <= query


def attention_weights(
    query: Array,
    key: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
) -> Array:
    """Compute the weights of attention, softmax(scale Q K^T + bias).

    Arguments and errors are those of `attention`.

    Returns:
        Array of shape (batch, heads, queries, keys); fully masked rows are zero.
    """
    check_shapes(query, key, key)
    key = repeat_kv(key, query)
    check_mask(mask, (*query.shape[:-1], key.shape[-2]))
    check_bias(bias, (*query.shape[:-1], key.shape[-2]))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return extra.cast_like(_weights(query, key, mask, bias, causal=causal, scale=scale, softcap=softcap), query)


def _weights(
    query: Array,
    key: Array,
    mask: Array | None,
    bias: Array | None,
    *,
    causal: bool,
    scale: float,
    softcap: float | None = None,
) -> Array:
    xp = array_namespace(query, key, bias)
    scores = xp.matmul(query * scale, xp.matrix_transpose(key))
    if softcap is not None:
        scores = xp.tanh(scores * (1.0 / softcap)) * softcap
    if bias is not None:
        scores = scores + bias
    if causal:
        visible = causal_mask(xp, query.shape[-2], key.shape[-2], device(query))
        mask = visible if mask is None else xp.logical_and(mask, visible)
    return softmax(scores, mask)


def _forward(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    dropout_mask: Array | None,
    *,
    causal: bool,
    scale: float,
    keep_probability: float,
    save: bool,
) -> tuple[Array, Any]:
    xp, weights = array_namespace(query, value), _weights(query, key, mask, bias, causal=causal, scale=scale)
    dropped = weights if dropout_mask is None else apply_dropout(weights, dropout_mask, keep_probability)
    return xp.matmul(dropped, value), (query, key, value, weights, dropout_mask)


def _vjp(
    g: Array, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float
) -> tuple[Any, ...]:
    """With P the weights, S the scores: dV = P^T g, dP = g V^T, dS = P (dP - sum(dP P)), dQ = dS K, dK = dS^T Q."""
    query, key, value, weights, dropout_mask = residuals
    xp = array_namespace(g, query, key, value)
    dropped = weights if dropout_mask is None else apply_dropout(weights, dropout_mask, keep_probability)
    dvalue = xp.matmul(xp.matrix_transpose(dropped), g)
    dweights = xp.matmul(g, xp.matrix_transpose(value))
    if dropout_mask is not None:
        dweights = apply_dropout(dweights, dropout_mask, keep_probability)
    dbias = softmax_cotangent(dweights, weights)  # the bias is added to the scaled scores
    dscores = dbias * scale
    dkey = xp.matmul(xp.matrix_transpose(dscores), query)
    return xp.matmul(dscores, key), dkey, dvalue, None, dbias, None


_operation = Operation("attention", _forward, _vjp, compute_in_float32=True)


def _grouped_forward(query: Array, key: Array, value: Array, *masks: Array | None, **static: Any) -> tuple[Array, Any]:
    output, residuals = _forward(query, repeat_kv(key, query), repeat_kv(value, query), *masks, **static)
    return output, (residuals, key.shape[1])


def _grouped_vjp(g: Array, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    ungrouped, heads = residuals
    dquery, dkey, dvalue, *rest = _vjp(g, ungrouped, needs, **static)
    return dquery, sum_kv_groups(dkey, heads), sum_kv_groups(dvalue, heads), *rest


# For backends with a kernel that reads each head of the keys once for all its query heads.
_grouped = Operation("grouped_attention", _grouped_forward, _grouped_vjp, compute_in_float32=True)


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_mask: Array | None = None,
    keep_probability: float = 1.0,
) -> Array:
    """Compute scaled dot-product attention, softmax(scale Q K^T + bias) V.

    Key and value may have fewer heads than the query, each shared by neighboring heads of the query: grouped-query
    attention (Ainslie et al., 2023) or, with one head, multi-query attention (Shazeer, 2019).

    Args:
        query: Array of shape (batch, heads, queries, head_dim).
        key: Array of shape (batch, key_value_heads, keys, head_dim).
        value: Array of shape (batch, key_value_heads, keys, value_dim).
        mask: Boolean, True = may attend, broadcastable to (batch, heads, queries, keys). A fully masked row gives
            zeros, and zero gradients.
        bias: Added to the scaled scores, broadcastable to (batch, heads, queries, keys), of the dtype of the query.
        causal: Whether to also mask keys later than the query; the last query sees the last key.
        scale: Scale of the scores, by default 1 / sqrt(head_dim).
        softcap: Limit c of the scaled scores, which become c tanh(score / c) (Gemma 2); no kernel has it.
        dropout_mask: Dropout mask of the weights, (batch, heads, queries, keys), True = keep.
        keep_probability: Probability with which the dropout mask was drawn.

    Returns:
        Array of shape (batch, heads, queries, value_dim).

    Raises:
        ShapeError: If the shapes do not match, or the mask is not boolean.
        BackendError: If the arrays are on different devices.
    """
    check_same_device((query, key, value, mask, bias))
    check_shapes(query, key, value)
    check_mask(mask, (*query.shape[:-1], key.shape[-2]))
    check_bias(bias, (*query.shape[:-1], key.shape[-2]))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    if softcap is not None:
        weights = attention_weights(query, key, mask, bias, causal=causal, scale=scale, softcap=softcap)
        dropped = weights if dropout_mask is None else apply_dropout(weights, dropout_mask, keep_probability)
        return array_namespace(dropped, value).matmul(dropped, repeat_kv(value, query))
    static = {"causal": causal, "scale": scale, "keep_probability": keep_probability}
    if not _is_grouped(query, key):
        return _operation(query, key, value, mask, bias, dropout_mask, **static)
    if query.shape[2] == 1 and dropout_mask is None and not any(_depends_on_head(x) for x in (mask, bias)):
        # Query heads that share keys can be queries of one head; without a mask, a single query sees every key.
        regrouped = _regroup(query, key.shape[1])
        arrays = regrouped, key, value, mask, bias, dropout_mask
        return _regroup(_operation(*arrays, **static | {"causal": False}), query.shape[1])
    if registry.has_kernel("grouped_attention", query):
        return _grouped(query, key, value, mask, bias, dropout_mask, **static)
    return _operation(query, repeat_kv(key, query), repeat_kv(value, query), mask, bias, dropout_mask, **static)


def _is_grouped(query: Array, key: Array) -> bool:
    """Return whether several heads of the query share a head of the keys."""
    return len(query.shape) == 4 and query.shape[1] > key.shape[1] > 0


def _depends_on_head(x: Array | None) -> bool:
    return x is not None and len(x.shape) > 2 and x.shape[-3] > 1


def _regroup(x: Array, heads: int) -> Array:
    """Reshape (batch, old_heads, queries, features) to another number of heads, and more or fewer queries."""
    batch, old_heads, queries, features = x.shape
    return array_namespace(x).reshape(x, (batch, heads, old_heads * queries // heads, features))


def repeat_kv(x: Array, query: Array) -> Array:
    """Repeat heads of keys or values, (batch, key_value_heads, length, features), that heads of the query share."""
    if not _is_grouped(query, x):
        return x
    (batch, heads, length, features), group = x.shape, query.shape[1] // x.shape[1]
    xp = array_namespace(x)
    repeated = xp.broadcast_to(xp.expand_dims(x, axis=2), (batch, heads, group, length, features))
    return xp.reshape(repeated, (batch, heads * group, length, features))


def sum_kv_groups(x: Array, heads: int) -> Array:
    """Sum the cotangents (batch, query_heads, length, features) of repeated heads, the VJP of `repeat_kv`."""
    if len(x.shape) != 4 or x.shape[1] in (heads, 0):
        return x
    batch, repeated, length, features = x.shape
    xp = array_namespace(x)
    groups = xp.reshape(x, (batch, heads, repeated // heads, length, features))
    return xp.astype(xp.sum(groups, axis=2, dtype=accumulation_dtype(xp, x.dtype)), x.dtype, copy=False)


def check_shapes(query: Array, key: Array, value: Array) -> None:
    """Raise ShapeError unless the shapes of query, key and value match."""
    shapes = [tuple(array.shape) for array in (query, key, value)]
    ranks = {len(shape) for shape in shapes}
    matches = (
        len(ranks) == 1 and min(ranks) >= 2 and shapes[0][-1] == shapes[1][-1] and shapes[1][:-1] == shapes[2][:-1]
    )
    sizes = [list(shape[:-2]) for shape in shapes[:2]]
    if matches and ranks == {4} and sizes[1][1] and sizes[0][1] % sizes[1][1] == 0:
        sizes[1][1] = sizes[0][1]  # grouped heads
    if not matches or any(len({1, *pair}) > 2 for pair in zip(*sizes, strict=True)):
        raise ShapeError(
            f"query, key and value have shapes {shapes[0]}, {shapes[1]}, {shapes[2]}; expected (..., queries, "
            "head_dim), (..., keys, head_dim), (..., keys, value_dim)"
        )


def check_mask(mask: Array | None, scores_shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless the mask is boolean and broadcastable to (batch, heads, queries, keys)."""
    if mask is None:
        return
    check_boolean(mask)
    if not _broadcasts(tuple(mask.shape), scores_shape):
        raise ShapeError(
            f"mask has shape {tuple(mask.shape)}; expected a shape broadcastable to {scores_shape} "
            "(batch, heads, queries, keys); see masks.padding(tokens, pad_id)"
        )


def check_boolean(mask: Array) -> None:
    """Raise ShapeError unless the mask is boolean."""
    array_namespace(mask)  # raises for a list or a number
    if dtype_name(mask.dtype) != "bool":
        raise ShapeError(
            f"mask has dtype {dtype_name(mask.dtype)}; expected bool, True = may attend; "
            "compare (mask != 0), or use masks.from_blocked(mask) where 1 means blocked"
        )


def check_bias(bias: Array | None, scores_shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless the bias is broadcastable to (batch, heads, queries, keys)."""
    if bias is not None and not _broadcasts(tuple(bias.shape), scores_shape):
        raise ShapeError(
            f"bias has shape {tuple(bias.shape)}; expected a shape broadcastable to {scores_shape} "
            "(batch, heads, queries, keys)"
        )


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, full) for size, full in pairs)
