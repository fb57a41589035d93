"""Kernels for NumPy arrays without the native library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.kernels.native import empty_heads
from xformer.ops.attention import with_repeated_heads
from xformer.ops.experts import experts_vjp, sliced_forward
from xformer.ops.operation import Kernel
from xformer.ops.optimizers import adam_forward, slots, updated
from xformer.threads import parallel_for

# --- adam -------------------------------------------------------------------------------------------------------------
# In place: the definition updates one parameter after another, so that memory for one is enough.


def _adam_why_not(grad_scale: Any, *arrays: Any, donate: bool = False, **options: Any) -> str | None:
    if not donate:
        return "the arrays are not donated"
    written: Any = updated(arrays)
    return None if all(array.flags.writeable for array in written) else "an array is read-only"


def _adam_forward(
    grad_scale: Any, *arrays: Any, weight_decay: Sequence[float], save: bool, **options: Any
) -> tuple[Any, Any]:
    for slot, rate in zip(slots(arrays), weight_decay, strict=True):
        results, _ = adam_forward(grad_scale, *slot, weight_decay=(rate,), save=save, **options)
        for array, result in zip(updated(slot), results, strict=True):
            array[...] = result
    return updated(arrays), None


# --- attention --------------------------------------------------------------------------------------------------------
# Flash attention on NumPy for long sequences: scores exist one tile at a time, so memory is linear in the length.
#
# As in Dao et al. (2022), with a core's cache instead of a GPU's shared memory. Terms that are added to all scores of a
# query or of a key are extra columns beside the features, so that the matrix product adds them: minus an upper bound of
# the query's scores (its norm times that of the longest key), and -1e30 for a masked key. A column of ones beside the
# values makes the product with the weights also return their sums. So the exponential is the only pass over a tile. If
# the bound is so loose that the sums underflow, an additional pass finds the largest scores.

_MIN_SCORES = 128 * 128  # of a head; the kernel for short sequences stores fewer
_QUERIES, _KEYS = 256, 512  # of a tile: half a megabyte of float32
_GROUP_SIZE = 128 * 1024  # scores of short heads that are computed together
_MIN_GROUPS = 16  # so that every thread has one
_MASKED = -1e30  # added to a score: its exponential is zero; unlike -inf it makes no NaN in a product
_MIN_LOG_SUM = -60.0  # exponentials of smaller numbers would lose digits


def _why_not(query: Any, key: Any, value: Any, mask: Any, bias: Any, dropout_mask: Any, **options: Any) -> str | None:
    if bias is not None or dropout_mask is not None:
        return "a bias or dropout"
    if mask is not None and any(size != 1 for size in mask.shape[-3:-1]):
        return "the mask depends on heads or queries"
    if query.shape[2] * key.shape[2] < _MIN_SCORES:
        return f"fewer than {_MIN_SCORES} scores per head"
    return None


class _Heads:
    """Attention of some heads of some sentences; arrays are (sentences, heads, length, features).

    key_mask: broadcastable to (sentences, heads, keys), or None.
    """

    def __init__(self, query: Any, key: Any, value: Any, key_mask: Any, scale: float, causal: bool) -> None:
        self.query, self.scale, self.causal = query, scale, causal
        self.num_queries, self.num_keys = query.shape[2], key.shape[2]
        if key_mask is not None:
            key = np.where(key_mask[..., None], key, key.dtype.type(0.0))  # padding may hold infinities
        self.key = key
        self.keys = _with_columns(key, 1.0, 1.0, 0.0 if key_mask is None else np.where(key_mask, 0.0, _MASKED))
        self.values = _with_columns(value, 1.0, 1.0)
        self.scores = np.empty(query[:, :, :_QUERIES, 0].size * min(self.num_keys, _KEYS), query.dtype)

    def tiles(self, rows: slice, query_bias: Any) -> Iterator[tuple[slice, Any]]:
        """Yield blocks of keys with the scores of a block of queries plus `query_bias`, all in one buffer."""
        queries = _with_columns(self.query[:, :, rows], self.scale, query_bias, 1.0)
        causal_offset = self.num_keys - self.num_queries  # the last query sees the last key
        visible = min(self.num_keys, max(0, rows.stop + causal_offset)) if self.causal else self.num_keys
        for columns in _blocks(visible, _KEYS):
            shape = (*queries.shape[:3], columns.stop - columns.start)
            tile = self.scores[: math.prod(shape)].reshape(shape)
            np.matmul(queries, self.keys[:, :, columns].mT, out=tile)
            if self.causal and columns.stop - 1 > rows.start + causal_offset:
                last_visible = np.arange(rows.start, rows.stop)[:, None] + causal_offset
                np.copyto(tile, _MASKED, where=np.arange(columns.start, columns.stop) > last_visible)
            yield columns, tile

    def weighted_sums(self, rows: slice, shift: Any) -> tuple[Any, Any]:
        """Return the sums over keys of exp(score - shift) times the values, and of exp alone."""
        total: Any = 0.0
        for columns, tile in self.tiles(rows, -shift):
            total += np.exp(tile, out=tile) @ self.values[:, :, columns]
        if isinstance(total, float):  # every key is later than these queries
            total = np.zeros((*shift.shape, self.values.shape[-1]), self.values.dtype)
        return total[..., :-1], total[..., -1]

    def max_scores(self, rows: slice) -> Any:
        """Return the largest score of each query, and zero for a fully masked row."""
        top = np.full(self.query[:, :, rows].shape[:3], _MASKED, self.query.dtype)
        for _, tile in self.tiles(rows, 0.0):
            np.maximum(top, tile.max(axis=-1), out=top)
        return np.where(top > 0.5 * _MASKED, top, top.dtype.type(0.0))

    def forward(self, out: Any, statistics: Any) -> None:
        """Write the output, and for each query a shift and 1 / sum(exp(score - shift)), (2, sentences, heads, queries).

        Their logsumexp would round the sum away beside a large shift.
        """
        max_key_norm = np.sqrt(np.vecdot(self.key, self.key).max(axis=-1, keepdims=True, initial=0.0))
        bounds = np.sqrt(np.vecdot(self.query, self.query)) * (abs(self.scale) * max_key_norm)
        for rows in _blocks(self.num_queries, _QUERIES):
            shift = bounds[:, :, rows]
            weighted, total = self.weighted_sums(rows, shift)
            if not total.min(initial=1.0) > np.exp(_MIN_LOG_SUM):
                shift = self.max_scores(rows)
                weighted, total = self.weighted_sums(rows, shift)
            visible = total > 0.0
            inverse = np.divide(1.0, total, out=np.zeros_like(total), where=visible)
            np.multiply(weighted, inverse[..., None], out=out[:, :, rows])
            statistics[0, :, :, rows], statistics[1, :, :, rows] = shift, inverse

    def backward(self, g: Any, out: Any, statistics: Any, dquery: Any, dkey: Any, dvalue: Any) -> None:
        """Write the cotangents, with P the weights: dV = P^T g, dS = P (g V^T - sum(g out)), dQ = dS K, dK = dS^T Q.

        The weights are exp(score - shift); the inverses of their sums are factors of g.
        """
        shifts, inverses = statistics
        dkey[...], dvalue[...] = 0.0, 0.0
        buffer = np.empty_like(self.scores)
        for rows in _blocks(self.num_queries, _QUERIES):
            query, g_rows = self.query[:, :, rows], g[:, :, rows] * inverses[:, :, rows, None]
            cotangent = _with_columns(g_rows, 1.0, -np.vecdot(g_rows, out[:, :, rows]))
            dquery_rows: Any = 0.0
            for columns, tile in self.tiles(rows, -shifts[:, :, rows]):
                weights = np.exp(tile, out=tile)
                dvalue[:, :, columns] += weights.mT @ cotangent[..., :-1]
                dscores = buffer[: tile.size].reshape(tile.shape)
                np.matmul(cotangent, self.values[:, :, columns].mT, out=dscores)
                dscores *= weights
                dquery_rows += dscores @ self.key[:, :, columns]
                dkey[:, :, columns] += dscores.mT @ query
            np.multiply(dquery_rows, self.scale, out=dquery[:, :, rows])
        dkey *= self.scale


def _with_columns(x: Any, scale: float, *columns: Any) -> Any:
    """Return a contiguous copy of scale * x with more features."""
    extended = np.empty((*x.shape[:-1], x.shape[-1] + len(columns)), x.dtype)
    np.multiply(x, scale, out=extended[..., : x.shape[-1]])
    for index, column in enumerate(columns, start=x.shape[-1]):
        extended[..., index] = column
    return extended


def _blocks(stop: int, size: int) -> Iterator[slice]:
    for first in range(0, stop, size):
        yield slice(first, min(first + size, stop))


def _groups(query: Any, key: Any) -> list[tuple[slice, slice]]:
    """Return slices of batch and heads; the tiles and the copied keys of a group stay in the cache if they are small.

    The groups depend on the shapes only, and so do the bits of the result.
    """
    batch, heads, queries, features = query.shape
    size = max(min(queries, _QUERIES), features) * key.shape[2]
    group_size = max(1, min(_GROUP_SIZE, batch * heads * size // _MIN_GROUPS))
    count = -(-batch * heads * size // group_size) or 1
    heads_step = -(-heads // max(1, count // max(batch, 1))) or 1
    batch_step = -(-batch // min(batch, count)) if batch else 1
    return [
        (slice(first, min(first + batch_step, batch)), slice(head, min(head + heads_step, heads)))
        for first in range(0, batch, batch_step)
        for head in range(0, heads, heads_step)
    ]


def _key_mask(mask: Any, sentences: slice) -> Any:
    """Return the mask of the keys of some sentences, (sentences, 1, keys) or (1, 1, keys), or None."""
    if mask is None:
        return None
    rows = mask.reshape(-1, 1, mask.shape[-1])
    return rows[sentences] if len(rows) > 1 else rows


def _forward(*arrays: Any, causal: bool, scale: float, keep_probability: float, save: bool) -> tuple[Any, Any]:
    query, key, value, mask, _, _ = arrays
    out = empty_heads((*query.shape[:3], value.shape[-1]), query.dtype)
    statistics = np.empty((2, *query.shape[:3]), query.dtype)
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:-1], key.shape[2]))

    def forward(group: tuple[slice, slice]) -> None:
        part = _Heads(query[group], key[group], value[group], _key_mask(mask, group[0]), scale, causal)
        part.forward(out[group], statistics[:, *group])

    parallel_for(forward, _groups(query, key))
    return out, (query, key, value, mask, out, statistics)


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    query, key, value, mask, out, statistics = residuals
    dquery, dkey, dvalue = (empty_heads(x.shape, query.dtype) for x in (query, key, value))

    def backward(group: tuple[slice, slice]) -> None:
        part = _Heads(query[group], key[group], value[group], _key_mask(mask, group[0]), scale, causal)
        part.backward(g[group], out[group], statistics[:, *group], dquery[group], dkey[group], dvalue[group])

    parallel_for(backward, _groups(query, key))
    return dquery, dkey, dvalue, None, None, None


# --- registration -----------------------------------------------------------------------------------------------------

_FLOATS = ("float32", "float64")
KERNELS = [
    Kernel("numpy.adam", "adam", "numpy", _adam_forward, None, _FLOATS, _adam_why_not),
    Kernel("numpy.flash_attention", "attention", "numpy", *with_repeated_heads(_forward, _vjp), _FLOATS, _why_not),
    Kernel("numpy.experts", "experts", "numpy", sliced_forward, experts_vjp),
]
