"""Attention on NumPy, compiled as a whole: tiles of scores that never leave the cache.

The idea is that of flash attention (Dao et al., 2022): with the largest score and the sum of exponentials so far, a
tile of keys needs no other, and the derivative makes the weights again from the logarithm of that sum. One loop serves
short and long sequences, with masks, biases and dropout; a single query, as in decoding, has one that copies nothing.
Nothing of them holds the interpreter, so threads share the heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.kernels.numba.thread_pool import share, threads_for
from xformer.kernels.numpy import attention as numpy_attention
from xformer.kernels.numpy.support import compiled, loops_of, nothing
from xformer.kernels.registry import Kernel, register

_HEADS_BACK = (0, 2, 1, 3)  # (batch, heads, length, features) from or to (batch, length, heads, features)
_LEAST_QUERIES = 16  # a key is read as fast as it is multiplied by so many
_MOST_FEATURES = 256  # of a head: what a row of a block holds (microkernel)


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    reason = numpy_attention.supports(arrays, static) or compiled(arrays, static)
    if reason is not None:
        return reason
    query, key, keep = arrays[0], arrays[1], arrays[5]
    if keep is not None and keep.shape != (*query.shape[:3], key.shape[2]):
        return "keep is broadcast"
    if max(query.shape[3], arrays[2].shape[3]) > _MOST_FEATURES:
        return f"heads of more than {_MOST_FEATURES} features"
    return None


def _added(mask: Any, bias: Any, keys: int, dtype: Any) -> Any:
    """What is added to the scores: (batch, heads, queries, keys), of which the first three may be 1.

    A bias of -1e30 or less hides a key, as a mask does.
    """
    if mask is None and bias is None:
        return nothing(4)
    added = np.zeros((1,), dtype) if bias is None else bias
    if mask is not None:
        added = np.where(mask, added, dtype.type(-np.inf))
    added = added.reshape((1,) * (4 - added.ndim) + added.shape)
    if added.shape[3] != keys:
        added = np.broadcast_to(added, (*added.shape[:3], keys))
    return np.ascontiguousarray(added)


def _over_heads(loops: Any, name: str, query: Any, key: Any, *arguments: Any) -> None:
    """Call a loop for all heads of all sentences, on several threads where it pays."""
    heads = query.shape[0] * query.shape[1]
    # A single query takes as long as it takes to read keys and values.
    work = heads * max(query.shape[2], _LEAST_QUERIES) * key.shape[2] * query.shape[3]
    share(getattr(loops, name), getattr(loops, f"{name}_parts"), heads, threads_for(work), query, key, *arguments)


def _in_rows(x: Any) -> Any:
    """The array itself, if the features are contiguous."""
    return x if x.strides[-1] == x.itemsize else np.ascontiguousarray(x)


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
    batch, heads, queries, _ = query.shape
    added = _added(mask, bias, key.shape[2], query.dtype)
    out = np.empty((batch, queries, heads, value.shape[-1]), query.dtype)
    query, key, value = map(_in_rows, (query, key, value))
    if queries == 1 and keep is None and not save:  # decoding
        _over_heads(loops_of("attention_forward"), "attend_once", query, key, value, added, scale, out)
        return out.transpose(_HEADS_BACK), None
    keep = nothing(4, np.bool_) if keep is None else np.ascontiguousarray(keep, bool)
    log_sums = np.empty((batch, heads, queries), query.dtype)
    settings = added, keep, causal, scale, 1.0 / keep_probability
    _over_heads(loops_of("attention_forward"), "attend", query, key, value, *settings, out, log_sums)
    return out.transpose(_HEADS_BACK), (query, key, value, added, keep, out, log_sums)


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    query, key, value, added, keep, out, log_sums = residuals
    g = np.ascontiguousarray(g.transpose(_HEADS_BACK))
    cotangents = [np.empty([x.shape[axis] for axis in _HEADS_BACK], x.dtype) for x in (query, key, value)]
    dbias = np.zeros((*query.shape[:3], key.shape[2]), query.dtype) if needs[4] else nothing(4)
    settings = added, keep, causal, scale, 1.0 / keep_probability
    _over_heads(
        loops_of("attention_backward"), "pull_back", query, key, value, *settings, out, log_sums, g, *cotangents, dbias
    )
    return *(x.transpose(_HEADS_BACK) for x in cotangents), None, dbias if needs[4] else None, None


register(Kernel("numba.attention", "attention", "numpy", _supports, _forward, _vjp, priority=20, kind="jit"))
