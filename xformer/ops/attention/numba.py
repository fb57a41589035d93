"""Fused attention on NumPy, compiled by numba: tiles of scores never leave the cache.

As in flash attention (Dao et al., 2022), the running maximum and sum of exponentials of each query make the tiles of
keys independent, and the derivative recomputes the weights from the logarithm of that sum. One kernel takes short and
long sequences with masks, biases and dropout; another takes few queries, as in decoding, and copies nothing. Both
release the GIL and distribute heads over threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends.recording import contiguous, empty, zeros
from xformer.ops._numba.compile import EMPTY_4D, EMPTY_MASK, compiled_kernel, why_not
from xformer.ops._numba.thread_pool import run_parallel, threads_for
from xformer.ops.attention.definition import with_repeated_heads
from xformer.ops.attention.numba_backward import backward, backward_parts
from xformer.ops.attention.numba_forward import (
    forward,
    forward_few_queries,
    forward_few_queries_parts,
    forward_parts,
)

_SWAP_LENGTH_AND_HEADS = (0, 2, 1, 3)  # (batch, heads, length, features) <-> (batch, length, heads, features)
_MIN_QUERIES = 16  # reading a key takes as long as multiplying it by this number of queries
_FEW_QUERIES = 5
_MAX_FEATURES = 256  # of a head: the depth of a block in microkernel


def _why_not(query: Any, key: Any, value: Any, *masks: Any, save: bool, **options: Any) -> str | None:
    if 0 in query.shape or 0 in key.shape:
        return "an empty array"
    if max(query.shape[3], value.shape[3]) > _MAX_FEATURES:
        return f"head_dim above {_MAX_FEATURES}"
    return why_not(query, key, value, *masks)


def _attn_bias(mask: Any, bias: Any, keys: int, dtype: Any) -> Any:
    """Return the sum of bias and mask, (batch or 1, heads or 1, queries or 1, keys); -inf masks a key."""
    if mask is None and bias is None:
        return EMPTY_4D
    attn_bias = np.zeros((1,), dtype) if bias is None else bias
    if mask is not None:
        attn_bias = np.where(mask, attn_bias, dtype.type(-np.inf))
    attn_bias = attn_bias.reshape((1,) * (4 - attn_bias.ndim) + attn_bias.shape)
    if attn_bias.shape[3] != keys:
        attn_bias = np.broadcast_to(attn_bias, (*attn_bias.shape[:3], keys))
    return contiguous(attn_bias)


def _run(kernel: Any, body: Any, query: Any, key: Any, *arguments: Any) -> None:
    """Call a kernel for all heads, on several threads if that pays off."""
    heads = query.shape[0] * query.shape[1]
    num_multiplications = heads * max(query.shape[2], _MIN_QUERIES) * key.shape[2] * query.shape[3]
    run_parallel(kernel, body, heads, threads_for(num_multiplications), query, key, *arguments)


def _contiguous_features(x: Any) -> Any:
    return x if x.strides[-1] == x.itemsize else contiguous(x)


def _forward(*arrays: Any, causal: bool, scale: float, keep_probability: float, save: bool) -> tuple[Any, Any]:
    query, key, value, mask, bias, dropout_mask = arrays
    batch, heads, queries, _ = query.shape
    attn_bias = _attn_bias(mask, bias, key.shape[2], query.dtype)
    out = empty((batch, queries, heads, value.shape[-1]), query.dtype)
    query, key, value = map(_contiguous_features, (query, key, value))
    sees_all = queries == 1 or not causal
    if queries <= _FEW_QUERIES and sees_all and dropout_mask is None and not save:  # decoding
        _run(forward_few_queries, forward_few_queries_parts, query, key, value, attn_bias, scale, out)
        return out.transpose(_SWAP_LENGTH_AND_HEADS), None
    if dropout_mask is None:
        dropout_mask = EMPTY_MASK
    else:
        dropout_mask = contiguous(np.broadcast_to(dropout_mask, (batch, heads, queries, key.shape[2])), bool)
    statistics = empty((2, batch, heads, queries), query.dtype)
    settings = attn_bias, dropout_mask, causal, scale, 1.0 / keep_probability
    _run(forward, forward_parts, query, key, value, *settings, out, statistics)
    return out.transpose(_SWAP_LENGTH_AND_HEADS), (query, key, value, attn_bias, dropout_mask, out, statistics)


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    query, key, value, attn_bias, dropout_mask, out, statistics = residuals
    g = contiguous(g.transpose(_SWAP_LENGTH_AND_HEADS))
    cotangents = [empty([x.shape[axis] for axis in _SWAP_LENGTH_AND_HEADS], x.dtype) for x in (query, key, value)]
    dbias = zeros((*query.shape[:3], key.shape[2]), query.dtype) if needs[4] else EMPTY_4D
    settings = attn_bias, dropout_mask, causal, scale, 1.0 / keep_probability
    saved = out, statistics, g
    _run(backward, backward_parts, query, key, value, *settings, *saved, *cotangents, dbias)
    dquery, dkey, dvalue = (x.transpose(_SWAP_LENGTH_AND_HEADS) for x in cotangents)
    return dquery, dkey, dvalue, None, dbias if needs[4] else None, None


KERNELS = [
    compiled_kernel("attention", *with_repeated_heads(_forward, _vjp), why_not=_why_not),
]
