"""Attention on NumPy, with the scores in the memory order (batch, keys, heads, queries).

The softmax then runs over the second axis, so that its passes work on long contiguous rows, one per key; with the keys
last, each row would be as short as a sentence. Tiles of some sentences, or of some heads of a long sentence, stay in
the cache through these passes. The output is laid out so that merging the heads copies nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.ops._numpy import FLOATS
from xformer.ops.attention.definition import with_repeated_heads
from xformer.ops.operation import Kernel

_TILE_SCORES = 96 * 1024  # with the other arrays of a tile, about a second-level cache
_SCORES_ORDER = (0, 3, 1, 2)  # (batch, heads, queries, keys) -> (batch, keys, heads, queries)


def _why_not(query: Any, key: Any, *arrays: Any, **options: Any) -> str | None:
    return "an empty array" if 0 in query.shape or 0 in key.shape else None


def tiles(batch: int, heads: int, scores: int, tile_scores: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of batch and heads with about `tile_scores` scores each; `scores` is the number per head."""
    count = -(-batch * heads * scores // tile_scores) or 1
    heads_step = -(-heads // max(1, count // max(batch, 1))) or 1
    batch_step = -(-batch // min(batch, count)) if batch else 1
    for first in range(0, batch, batch_step):
        for head in range(0, heads, heads_step):
            yield slice(first, min(first + batch_step, batch)), slice(head, min(head + heads_step, heads))


def empty_heads(batch: int, heads: int, length: int, features: int, dtype: Any) -> Any:
    """Allocate (batch, heads, length, features) in the memory order (batch, length, heads, features)."""
    return np.empty((batch, length, heads, features), dtype=dtype).transpose(0, 2, 1, 3)


@functools.lru_cache(maxsize=64)
def _causal_bias(queries: int, keys: int, dtype: Any) -> Any:
    """Return -inf for keys later than the query, else zero, as (1, keys, 1, queries)."""
    is_later = np.arange(keys)[:, None] > np.arange(keys - queries, keys)
    bias = np.where(is_later, dtype.type(-np.inf), dtype.type(0.0)).reshape(1, keys, 1, queries)
    bias.flags.writeable = False
    return bias


def _in_scores_order(x: Any) -> Any:
    """View an array broadcastable to (batch, heads, queries, keys) in the memory order of the scores."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape).transpose(_SCORES_ORDER)


def _attn_bias(mask: Any, bias: Any, causal: bool, queries: int, keys: int, dtype: Any) -> Any:
    """Return the sum of the bias and of -inf where a key is masked, in the order of the scores, or None."""
    # Adding a small broadcast array is several times faster than a masked copy over all scores.
    attn_bias = None if bias is None else _in_scores_order(bias)
    if mask is not None:
        mask_bias = np.where(_in_scores_order(mask), dtype.type(0.0), dtype.type(-np.inf))
        attn_bias = mask_bias if attn_bias is None else attn_bias + mask_bias
    if causal and queries > 1:  # a single query is the last one, and sees every key
        causal_bias = _causal_bias(queries, keys, dtype)
        attn_bias = causal_bias if attn_bias is None else attn_bias + causal_bias
    return attn_bias


def _bias_tile(attn_bias: Any, batch: slice, heads: slice) -> Any:
    """Return the bias of a tile; batch and heads may be broadcast."""
    if attn_bias is None:
        return None
    everything = slice(None)
    batch = batch if attn_bias.shape[0] > 1 else everything
    return attn_bias[batch, :, heads if attn_bias.shape[2] > 1 else everything]


def _mask_nan(scores: Any, attn_bias: Any, top: Any, axis: int) -> None:
    """Mask the NaN scores of masked keys, which are still NaN after adding -inf."""
    if np.isnan(top).any():
        np.copyto(scores, -np.inf, where=attn_bias == -np.inf)
        scores.max(axis=axis, keepdims=True, out=top)


def _softmax(scores: Any, attn_bias: Any, axis: int) -> None:
    """Replace scores with weights, in place; a fully masked row gives zeros."""
    if attn_bias is not None:
        scores += attn_bias
    top = scores.max(axis=axis, keepdims=True)
    if attn_bias is not None:
        _mask_nan(scores, attn_bias, top, axis)
        np.maximum(top, np.finfo(top.dtype).min, out=top)  # -inf minus -inf would be NaN
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=axis, keepdims=True)
    np.maximum(total, 1.0, out=total)  # the largest score alone gives exp(0) = 1; less means that all are masked
    scores *= np.divide(1.0, total, out=total)


def _single_query(query: Any, key: Any, value: Any, mask: Any, bias: Any, scale: float) -> Any:
    """Compute attention of one query, as in decoding, without copying keys and values."""
    scores = np.matmul(query * scale, key.mT)
    if mask is not None:
        mask_bias = np.where(mask, scores.dtype.type(0.0), -np.inf)
        bias = mask_bias if bias is None else bias + mask_bias
    _softmax(scores, bias, axis=-1)
    return np.matmul(scores, value)


def _forward(*arrays: Any, causal: bool, scale: float, keep_probability: float, save: bool) -> tuple[Any, Any]:
    query, key, value, mask, bias, dropout_mask = arrays
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    if queries == 1 and dropout_mask is None and not save:
        return _single_query(query, key, value, mask, bias, scale), None
    attn_bias = _attn_bias(mask, bias, causal, queries, keys, query.dtype)
    if dropout_mask is not None:
        dropout_mask = np.broadcast_to(dropout_mask, (batch, heads, queries, keys))
        dropout_mask = np.ascontiguousarray(dropout_mask.transpose(_SCORES_ORDER))
    saved_weights = np.empty((batch, keys, heads, queries), dtype=query.dtype) if save else None
    out = empty_heads(batch, heads, queries, value.shape[-1], query.dtype)
    for b, h in tiles(batch, heads, queries * keys, _TILE_SCORES):
        # The scales are applied to the operands, not to the products: a pass in memory order brings a tile into the
        # cache faster than many small products do, each of which reads a few of its columns.
        q, k, v = query[b, h] * scale, key[b, h] * 1.0, value[b, h] * (1.0 / keep_probability)
        if saved_weights is None:
            weights = np.empty((len(k), keys, k.shape[1], queries), k.dtype)
        else:
            weights = saved_weights[b, :, h]
        np.matmul(k, q.mT, out=weights.transpose(0, 2, 1, 3))
        _softmax(weights, _bias_tile(attn_bias, b, h), axis=1)
        dropped = weights if dropout_mask is None else weights * dropout_mask[b, :, h]
        np.matmul(dropped.transpose(0, 2, 3, 1), v, out=out[b, h])
    return out, (query, key, value, saved_weights, dropout_mask)


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    """With P the weights and P' the weights after dropout: dV = P' g, E = P' (V g), dS = E - P sum(E)."""
    query, key, value, saved_weights, dropout_mask = residuals
    (batch, heads, queries, head_dim), keys = query.shape, key.shape[2]
    dquery = empty_heads(batch, heads, queries, head_dim, query.dtype)
    dkey = empty_heads(batch, heads, keys, head_dim, query.dtype)
    dvalue = empty_heads(batch, heads, keys, value.shape[-1], query.dtype)
    dbias = np.empty_like(saved_weights) if needs[4] else None
    for b, h in tiles(batch, heads, queries * keys, _TILE_SCORES):
        q, k, v = query[b, h] * scale, key[b, h] * scale, value[b, h] * (1.0 / keep_probability)
        g_tile, weights = g[b, h], saved_weights[b, :, h]
        dropped = weights if dropout_mask is None else weights * dropout_mask[b, :, h]
        dscores = np.empty_like(weights)
        np.matmul(v, g_tile.mT, out=dscores.transpose(0, 2, 1, 3))
        np.matmul(dropped.transpose(0, 2, 1, 3), g_tile * (1.0 / keep_probability), out=dvalue[b, h])
        dscores *= dropped
        weights *= dscores.sum(axis=1, keepdims=True)
        dscores -= weights
        if dbias is not None:
            dbias[b, :, h] = dscores
        np.matmul(dscores.transpose(0, 2, 3, 1), k, out=dquery[b, h])
        np.matmul(dscores.transpose(0, 2, 1, 3), q, out=dkey[b, h])
    return dquery, dkey, dvalue, None, None if dbias is None else dbias.transpose(0, 2, 3, 1), None


KERNELS = [
    Kernel(
        "numpy.attention", "attention", "numpy", *with_repeated_heads(_forward, _vjp), dtypes=FLOATS, why_not=_why_not
    )
]
