"""Attention on NumPy: scores in one buffer, outputs laid out so that merging heads copies nothing."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from xformer.kernels.numpy_support import floats
from xformer.kernels.registry import Kernel, register


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    query, key, value = arrays[:3]
    if query.ndim != 4 or key.ndim != 4 or value.ndim != 4:
        return "not (batch, heads, length, features)"
    if query.shape[:2] != key.shape[:2] or key.shape[:3] != value.shape[:3]:
        return "batch or heads are broadcast"
    return floats(arrays, static)


@functools.lru_cache(maxsize=64)
def _causal(queries: int, keys: int) -> Any:
    """True where a key is not later than the query."""
    mask = np.arange(keys) <= np.arange(keys - queries, keys)[:, None]
    mask.flags.writeable = False
    return mask


def _empty_heads(batch: int, heads: int, length: int, features: int, dtype: Any) -> Any:
    """(batch, heads, length, features), stored (batch, length, heads, features): heads merge without a copy."""
    return np.empty((batch, length, heads, features), dtype=dtype).transpose(0, 2, 1, 3)


def _weights(query: Any, key: Any, mask: Any, causal: bool, scale: float) -> Any:
    """Softmax of the scores; rows without any key are zero."""
    scores = np.matmul(query, key.swapaxes(-1, -2))
    scores *= scale
    if causal and query.shape[-2] > 1:  # one query is the last one, and sees every key
        allowed = _causal(query.shape[-2], key.shape[-2])
        mask = allowed if mask is None else mask & allowed
    if mask is not None:
        # Adding a small broadcast array is several times faster than a masked copy over all scores.
        scores += np.where(mask, scores.dtype.type(0), scores.dtype.type(-np.inf))
    top = scores.max(axis=-1, keepdims=True)
    if mask is not None:
        top[top == -np.inf] = 0.0
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if mask is not None:
        total[total == 0.0] = 1.0
    scores *= np.divide(1.0, total, out=total)
    return scores


def _forward(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    keep: Any,
    *,
    causal: bool,
    scale: float,
    keep_probability: float,
    save: bool,
) -> tuple[Any, Any]:
    weights = _weights(query, key, mask, causal, scale)
    dropped = weights if keep is None else weights * keep
    out = _empty_heads(*query.shape[:3], value.shape[-1], query.dtype)
    np.matmul(dropped, value, out=out)
    if keep is not None:
        out *= 1.0 / keep_probability
    return out, (query, key, value, weights, keep)


def _vjp(
    g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float
) -> tuple[Any, ...]:
    query, key, value, weights, keep = residuals
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[-2]
    if keep is not None:
        g = g * (1.0 / keep_probability)
    dscores = np.matmul(g, value.swapaxes(-1, -2))
    dropped = weights
    if keep is not None:
        dropped = weights * keep
        dscores *= keep
    dvalue = _empty_heads(batch, heads, keys, value.shape[-1], query.dtype)
    np.matmul(dropped.swapaxes(-1, -2), g, out=dvalue)
    # dS = P (dP - sum(dP P)) scale
    dscores -= np.vecdot(dscores, weights)[..., None]
    dscores *= weights
    dscores *= scale
    dquery = _empty_heads(batch, heads, queries, head_dim, query.dtype)
    dkey = _empty_heads(batch, heads, keys, head_dim, query.dtype)
    np.matmul(dscores, key, out=dquery)
    np.matmul(dscores.swapaxes(-1, -2), query, out=dkey)
    return dquery, dkey, dvalue, None, None


register(Kernel("numpy.attention", "attention", "numpy", _supports, _forward, _vjp))
