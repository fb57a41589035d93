"""Attention on NumPy, with the scores stored keys first.

Scores lie in memory as (batch, keys, heads, queries): a row holds what all queries of a sentence, in all heads, think
of one key. So the softmax runs over the second axis, and each of its passes works on long rows, where the usual
(batch, heads, queries, keys) would cut them at every query. Tiles of a few sentences, or of a few heads of a long
sentence, keep those passes in the cache; heads are laid out so that merging them copies nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.kernels.numpy.support import floats
from xformer.kernels.registry import Kernel, register

_TILE_SCORES = 96 * 1024  # with what else a tile touches, about a core's second-level cache
_STORED = (0, 3, 1, 2)  # (batch, heads, queries, keys) -> (batch, keys, heads, queries)


def supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """None for what the kernels of attention can serve, else the reason why not."""
    query, key, value, _, bias, _ = arrays
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return "not (batch, heads, length, features)"
    if query.shape[:2] != key.shape[:2] or key.shape[:3] != value.shape[:3]:
        return "batch or heads are broadcast"
    if key.shape[2] == 0:
        return "no keys"
    if bias is not None and bias.dtype != query.dtype:
        return "the bias is of another dtype"
    return floats(arrays, static)


def _tiles(batch: int, heads: int, scores: int) -> Iterator[tuple[slice, slice]]:
    """Cut (batch, heads) into equal blocks of about _TILE_SCORES, `scores` being those of one head."""
    blocks = -(-batch * heads * scores // _TILE_SCORES) or 1
    heads_step = -(-heads // max(1, blocks // max(batch, 1)))
    batch_step = -(-batch // min(batch, blocks)) if batch else 1
    for first in range(0, batch, batch_step):
        for head in range(0, heads, heads_step):
            yield slice(first, min(first + batch_step, batch)), slice(head, min(head + heads_step, heads))


def _empty_heads(batch: int, heads: int, length: int, features: int, dtype: Any) -> Any:
    """(batch, heads, length, features), stored (batch, length, heads, features)."""
    return np.empty((batch, length, heads, features), dtype=dtype).transpose(0, 2, 1, 3)


@functools.lru_cache(maxsize=64)
def _causal_bias(queries: int, keys: int, dtype: Any) -> Any:
    """Zero where a key is not later than the query, else minus infinity: (1, keys, 1, queries)."""
    late = np.arange(keys)[:, None] > np.arange(keys - queries, keys)
    bias = np.where(late, dtype.type(-np.inf), dtype.type(0.0)).reshape(1, keys, 1, queries)
    bias.flags.writeable = False
    return bias


def _stored(x: Any) -> Any:
    """Something broadcastable to the scores, seen in their memory order."""
    return x.reshape((1,) * (4 - x.ndim) + x.shape).transpose(_STORED)


def _bias(mask: Any, bias: Any, causal: bool, queries: int, keys: int, dtype: Any) -> Any:
    """What to add to the scores, stored as they are, or None: the bias, and minus infinity where no key counts."""
    # Adding a small broadcast array is several times faster than a masked copy over all scores.
    if bias is not None:
        bias = _stored(bias)
    if mask is not None:
        forbidden = np.where(_stored(mask), dtype.type(0.0), dtype.type(-np.inf))
        bias = forbidden if bias is None else bias + forbidden
    if causal and queries > 1:  # a single query is the last one, and sees every key
        late = _causal_bias(queries, keys, dtype)
        bias = late if bias is None else bias + late
    return bias


def _part(bias: Any, batch: slice, heads: slice) -> Any:
    """The part of a bias that belongs to a tile; batch and heads may be broadcast."""
    if bias is None:
        return None
    return bias[batch if bias.shape[0] > 1 else slice(None), :, heads if bias.shape[2] > 1 else slice(None)]


def _softmax(scores: Any, bias: Any, axis: int) -> None:
    """Turn scores into weights, in place; a query without any key gets zeros."""
    if bias is not None:
        scores += bias
    top = scores.max(axis=axis, keepdims=True)
    if bias is not None:
        np.maximum(top, np.finfo(top.dtype).min, out=top)  # -inf minus -inf would be NaN
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=axis, keepdims=True)
    np.maximum(total, 1.0, out=total)  # the best key alone gives exp(0) = 1; less means that there is none
    scores *= np.divide(1.0, total, out=total)


def _one_query(query: Any, key: Any, value: Any, mask: Any, bias: Any, scale: float) -> Any:
    """Decoding: little arithmetic on many keys and values, which are best left where they are."""
    scores = np.matmul(query * scale, key.mT)
    if mask is not None:
        forbidden = np.where(mask, scores.dtype.type(0.0), -np.inf)
        bias = forbidden if bias is None else bias + forbidden
    _softmax(scores, bias, axis=-1)
    return np.matmul(scores, value)


def _forward(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    keep: Any,
    *,
    causal: bool,
    scale: float,
    keep_probability: float,
    save: bool,
) -> tuple[Any, Any]:
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    if queries == 1 and keep is None and not save:
        return _one_query(query, key, value, mask, bias, scale), None
    bias = _bias(mask, bias, causal, queries, keys, query.dtype)
    keep = None if keep is None else np.ascontiguousarray(keep.transpose(_STORED))
    kept = np.empty((batch, keys, heads, queries), dtype=query.dtype) if save else None
    out = _empty_heads(batch, heads, queries, value.shape[-1], query.dtype)
    for b, h in _tiles(batch, heads, queries * keys):
        # Factors go to the inputs of the products, not to their outputs: a pass in the order of the memory brings a
        # tile into the cache faster than many small products do, each of which takes a few columns of it.
        q, k, v = query[b, h] * scale, key[b, h] * 1.0, value[b, h] * (1.0 / keep_probability)
        weights = np.empty((len(k), keys, k.shape[1], queries), k.dtype) if kept is None else kept[b, :, h]
        np.matmul(k, q.mT, out=weights.transpose(0, 2, 1, 3))
        _softmax(weights, _part(bias, b, h), axis=1)
        dropped = weights if keep is None else weights * keep[b, :, h]
        np.matmul(dropped.transpose(0, 2, 3, 1), v, out=out[b, h])
    return out, (query, key, value, kept, keep)


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    """With P the weights and P' what dropout leaves of them: dV = P' g, E = P' (V g), dS = E - P sum(E)."""
    query, key, value, kept, keep = residuals
    (batch, heads, queries, head_dim), keys = query.shape, key.shape[2]
    dquery = _empty_heads(batch, heads, queries, head_dim, query.dtype)
    dkey = _empty_heads(batch, heads, keys, head_dim, query.dtype)
    dvalue = _empty_heads(batch, heads, keys, value.shape[-1], query.dtype)
    dbias = np.empty_like(kept) if needs[4] else None
    for b, h in _tiles(batch, heads, queries * keys):
        q, k, v = query[b, h] * scale, key[b, h] * scale, value[b, h] * (1.0 / keep_probability)
        g_tile, weights = g[b, h], kept[b, :, h]
        dropped = weights if keep is None else weights * keep[b, :, h]
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


register(Kernel("numpy.attention", "attention", "numpy", supports, _forward, _vjp))
