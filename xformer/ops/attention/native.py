"""Attention in the native library: tiles of scores never leave the cache.

As in flash attention (Dao et al., 2022), the running maximum and sum of exponentials of each query make the tiles of
keys independent, and the derivative recomputes the weights from them. Masks and biases are broadcast, and grouped heads
share keys, without copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel

_SWAP_LENGTH_AND_HEADS = (0, 2, 1, 3)  # (batch, length, heads, features) -> (batch, heads, length, features)


def _contiguous_rows(x: Any) -> Any:
    """Return an array whose last axis is contiguous or broadcast."""
    if x is None or not x.ndim or x.shape[-1] == 1 or x.strides[-1] in (0, x.itemsize):
        return x
    return native.contiguous(x)


def _contiguous_features(x: Any) -> Any:
    return x if x.strides[-1] == x.itemsize else native.contiguous(x)


def _empty_heads(shape: tuple[int, ...]) -> Any:
    """Allocate (batch, heads, length, features) in the memory order (batch, length, heads, features)."""
    batch, heads, length, features = shape
    return np.empty((batch, length, heads, features), np.float32).transpose(_SWAP_LENGTH_AND_HEADS)


def _forward(*arrays: Any, causal: bool, scale: float, keep_probability: float, save: bool) -> tuple[Any, Any]:
    query, key, value = map(_contiguous_features, arrays[:3])
    masks = tuple(map(_contiguous_rows, arrays[3:]))
    out = _empty_heads((*query.shape[:3], value.shape[3]))
    statistics = np.empty((2, *query.shape[:3]), np.float32) if save else None
    saved = query, key, value, *masks, out, statistics
    native.call("attention", saved, causal, n0=scale, n1=1.0 / keep_probability)
    return out, saved


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    query, key, value = residuals[:3]
    dquery, dkey, dvalue = (_empty_heads(x.shape) for x in (query, key, value))
    dbias = native.zeros((*query.shape[:3], key.shape[2]), np.float32) if needs[4] else None
    arrays = (*residuals, _contiguous_features(g), dquery, dkey, dvalue, dbias)
    native.call("attention_vjp", arrays, causal, n0=scale, n1=1.0 / keep_probability)
    return dquery, dkey, dvalue, None, dbias, None


KERNELS = [native_kernel("attention", _forward, _vjp)]
