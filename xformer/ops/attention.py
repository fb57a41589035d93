"""Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1)."""

from __future__ import annotations

import math
from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import (
    Array,
    Device,
    Namespace,
    accumulation_dtype,
    array_namespace,
    device,
    dtype_name,
    extra,
    same_device,
)
from xformer.errors import ShapeError
from xformer.kernels import registry
from xformer.ops.dropout import apply_keep
from xformer.ops.operation import Operation
from xformer.ops.softmax import softmax, softmax_cotangent


def causal_mask(xp: Namespace, queries: int, keys: int, device: Device = None) -> Array:
    """Boolean (queries, keys): True where a key is not later than the query, the last query seeing the last key."""
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
) -> Array:
    """The probabilities with which each query attends to each key: (batch, heads, queries, keys).

    Shapes, mask and bias are those of `attention`; rows that may attend nowhere are zero.
    """
    check_shapes(query, key, key)
    key = repeat_kv(key, query)
    check_mask(mask, (*query.shape[:-1], key.shape[-2]))
    check_bias(bias, (*query.shape[:-1], key.shape[-2]))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    return extra.cast_like(_weights(query, key, mask, bias, causal=causal, scale=scale), query)


def _weights(query: Array, key: Array, mask: Array | None, bias: Array | None, *, causal: bool, scale: float) -> Array:
    xp = array_namespace(query, key, bias)
    scores = xp.matmul(query * scale, xp.matrix_transpose(key))
    if bias is not None:
        scores = scores + bias
    if causal:
        allowed = causal_mask(xp, query.shape[-2], key.shape[-2], device(query))
        mask = allowed if mask is None else xp.logical_and(mask, allowed)
    return softmax(scores, mask)


def _forward(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    keep: Array | None,
    *,
    causal: bool,
    scale: float,
    keep_probability: float,
    save: bool,
) -> tuple[Array, Any]:
    xp, weights = array_namespace(query, value), _weights(query, key, mask, bias, causal=causal, scale=scale)
    dropped = weights if keep is None else apply_keep(weights, keep, keep_probability)
    return xp.matmul(dropped, value), (query, key, value, weights, keep)


def _vjp(
    g: Array, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float
) -> tuple[Any, ...]:
    """With P the weights and S the scores: dV = P'g, dP = gV', dS = P (dP - sum(dP P)), dQ = dS K, dK = dS'Q."""
    query, key, value, weights, keep = residuals
    xp = array_namespace(g, query, key, value)
    dropped = weights if keep is None else apply_keep(weights, keep, keep_probability)
    dvalue = xp.matmul(xp.matrix_transpose(dropped), g)
    dweights = xp.matmul(g, xp.matrix_transpose(value))
    if keep is not None:
        dweights = apply_keep(dweights, keep, keep_probability)
    dbias = softmax_cotangent(dweights, weights)  # a bias is added to the scores as they are
    dscores = dbias * scale
    dkey = xp.matmul(xp.matrix_transpose(dscores), query)
    return xp.matmul(dscores, key), dkey, dvalue, None, dbias, None


_operation = Operation(Implementation("attention", _forward, _vjp), compute_in_float32=True)


def _grouped_forward(query: Array, key: Array, value: Array, *others: Array | None, **static: Any) -> tuple[Array, Any]:
    output, residuals = _forward(query, repeat_kv(key, query), repeat_kv(value, query), *others, **static)
    return output, (residuals, key.shape[1])


def _grouped_vjp(g: Array, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    inner, heads = residuals
    dquery, dkey, dvalue, *others = _vjp(g, inner, needs, **static)
    return dquery, sum_kv_groups(dkey, heads), sum_kv_groups(dvalue, heads), *others


# For libraries with a kernel that reads each head of keys once, however many heads of the query it serves.
_grouped = Operation(Implementation("grouped_attention", _grouped_forward, _grouped_vjp), compute_in_float32=True)


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    keep: Array | None = None,
    keep_probability: float = 1.0,
) -> Array:
    """Attend from queries to keys and average the values with the resulting weights.

    query: (batch, heads, queries, head_dim); key: (batch, heads, keys, head_dim);
    value: (batch, heads, keys, value_dim). Key and value may have fewer heads, each then serving as many
    neighboring heads of the query (Ainslie et al., 2023; one head: Shazeer, 2019).
    mask: boolean, True = may attend, broadcastable to (batch, heads, queries, keys). A query that may attend
    nowhere gets zeros, and zero gradients.
    bias: added to the scaled scores, broadcastable to (batch, heads, queries, keys), of the query's dtype.
    causal: also forbid keys later than the query; the last query sees the last key.
    scale: of the scores; default 1 / sqrt(head_dim).
    keep, keep_probability: a drawn dropout mask for the weights, (batch, heads, queries, keys).

    Returns (batch, heads, queries, value_dim). Raises ShapeError when shapes do not fit or the mask is not boolean,
    BackendError when the arrays are not all on one device.
    """
    same_device((query, key, value, mask, bias))  # masks and biases come from anywhere, so here is where to look
    check_shapes(query, key, value)
    check_mask(mask, (*query.shape[:-1], key.shape[-2]))
    check_bias(bias, (*query.shape[:-1], key.shape[-2]))
    scale = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    static = {"causal": causal, "scale": scale, "keep_probability": keep_probability}
    if not _in_groups(query, key):
        return _operation(query, key, value, mask, bias, keep, **static)
    if query.shape[2] == 1 and keep is None and not any(_by_head(each) for each in (mask, bias)):
        # Heads that share keys are as good as queries that do; a last query of its own sees every key.
        groups = _with_heads(query, key.shape[1]), key, value, mask, bias, keep
        return _with_heads(_operation(*groups, **static | {"causal": False}), query.shape[1])
    if registry.has_kernel("grouped_attention", query):
        return _grouped(query, key, value, mask, bias, keep, **static)
    return _operation(query, repeat_kv(key, query), repeat_kv(value, query), mask, bias, keep, **static)


def _in_groups(query: Array, key: Array) -> bool:
    """Whether heads of the keys serve several heads of the query."""
    return len(query.shape) == 4 and query.shape[1] > key.shape[1] > 0


def _by_head(x: Array | None) -> bool:
    return x is not None and len(x.shape) > 2 and x.shape[-3] > 1


def _with_heads(x: Array, heads: int) -> Array:
    """Have so many heads, of which the others' queries become queries: (batch, heads, queries, features)."""
    batch, before, queries, features = x.shape
    return array_namespace(x).reshape(x, (batch, heads, before * queries // heads, features))


def repeat_kv(x: Array, query: Array) -> Array:
    """Repeat the heads of keys or values that serve several heads of the query."""
    if not _in_groups(query, x):
        return x
    (batch, heads, length, features), group = x.shape, query.shape[1] // x.shape[1]
    xp = array_namespace(x)
    repeated = xp.broadcast_to(xp.expand_dims(x, axis=2), (batch, heads, group, length, features))
    return xp.reshape(repeated, (batch, heads * group, length, features))


def sum_kv_groups(x: Array, heads: int) -> Array:
    """Sum the cotangents of repeated heads, if any: (batch, query_heads, length, features) -> (batch, heads, ...)."""
    if len(x.shape) != 4 or x.shape[1] in (heads, 0):
        return x
    batch, repeated, length, features = x.shape
    xp = array_namespace(x)
    groups = xp.reshape(x, (batch, heads, repeated // heads, length, features))
    return xp.astype(xp.sum(groups, axis=2, dtype=accumulation_dtype(xp, x.dtype)), x.dtype, copy=False)


def check_shapes(query: Array, key: Array, value: Array) -> None:
    """Raise ShapeError unless query, key and value fit together."""
    shapes = [tuple(array.shape) for array in (query, key, value)]
    ranks = {len(shape) for shape in shapes}
    fits = len(ranks) == 1 and min(ranks) >= 2 and shapes[0][-1] == shapes[1][-1] and shapes[1][:-1] == shapes[2][:-1]
    sizes = [list(shape[:-2]) for shape in shapes[:2]]
    if fits and ranks == {4} and sizes[1][1] and sizes[0][1] % sizes[1][1] == 0:
        sizes[1][1] = sizes[0][1]  # heads that serve several
    if not fits or any(len({1, *pair}) > 2 for pair in zip(*sizes, strict=True)):
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
            f"mask has shape {tuple(mask.shape)}; expected one broadcastable to {scores_shape} (batch, heads, queries, "
            "keys); see masks.padding(tokens, pad_id)"
        )


def check_boolean(mask: Array) -> None:
    """Raise ShapeError unless the mask is boolean."""
    array_namespace(mask)  # a list or a number is no mask
    if dtype_name(mask.dtype) != "bool":
        raise ShapeError(
            f"mask has dtype {dtype_name(mask.dtype)}; expected bool, True = may attend; "
            "compare (mask != 0), or use masks.from_blocked(mask) where 1 means blocked"
        )


def check_bias(bias: Array | None, scores_shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless the bias is broadcastable to (batch, heads, queries, keys)."""
    if bias is not None and not _broadcasts(tuple(bias.shape), scores_shape):
        raise ShapeError(
            f"bias has shape {tuple(bias.shape)}; expected one broadcastable to {scores_shape} (batch, heads, queries, "
            "keys)"
        )


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, full) for size, full in pairs)
