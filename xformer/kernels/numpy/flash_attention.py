"""Flash attention on NumPy for long sequences: scores exist one tile at a time, so memory is linear in the length.

As in Dao et al. (2022), with a core's cache instead of a GPU's shared memory. Terms that are added to all scores of a
query or of a key are extra columns beside the features, so that the matrix product adds them: minus an upper bound of
the query's scores (its norm times that of the longest key), and -1e30 for a masked key. A column of ones beside the
values makes the product with the weights also return their sums. So the exponential is the only pass over a tile. If
the bound is so loose that the sums underflow, an additional pass finds the largest scores.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.kernels.numpy import attention as numpy_attention
from xformer.kernels.registry import Kernel, register
from xformer.threads import parallel_for

_MIN_SCORES = 128 * 128  # of a head; the kernel for short sequences stores fewer
_QUERIES, _KEYS = 256, 512  # of a tile: half a megabyte of float32
_MASKED = -1e30  # added to a score: its exponential is zero; unlike -inf it makes no NaN in a product
_MIN_LOG_SUM = -60.0  # exponentials of smaller numbers would lose digits


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    query, key, _, mask, bias, dropout_mask = arrays
    reason = numpy_attention.supports(arrays, static)
    if reason is not None:
        return reason
    if bias is not None or dropout_mask is not None:
        return "a bias or dropout"
    if mask is not None and any(size != 1 for size in mask.shape[-3:-1]):
        return "the mask depends on heads or queries"
    if query.shape[2] * key.shape[2] < _MIN_SCORES:
        return f"fewer than {_MIN_SCORES} scores per head"
    return None


class _Head:
    """Attention of one head of one sentence; key_mask: (keys,), or None."""

    def __init__(self, query: Any, key: Any, value: Any, key_mask: Any, scale: float, causal: bool) -> None:
        self.query, self.scale, self.causal = query, scale, causal
        (self.num_queries, features), self.num_keys = query.shape, len(key)
        if key_mask is not None:
            key = np.where(key_mask[:, None], key, key.dtype.type(0.0))  # padding may hold infinities
        self.key = key
        self.keys = np.empty((self.num_keys, features + 2), key.dtype)
        self.keys[:, :features] = key
        self.keys[:, -2] = 1.0
        self.keys[:, -1] = 0.0 if key_mask is None else np.where(key_mask, 0.0, _MASKED)
        self.values = np.ones((self.num_keys, value.shape[1] + 1), value.dtype)
        self.values[:, :-1] = value
        self.scores = np.empty(_QUERIES * _KEYS, query.dtype)

    def blocks(self) -> Iterator[slice]:
        """Yield blocks of queries."""
        return _blocks(self.num_queries, _QUERIES)

    def tiles(self, rows: slice, query_bias: Any) -> Iterator[tuple[slice, Any]]:
        """Yield blocks of keys with the scores of a block of queries plus `query_bias`, all in one buffer."""
        queries = np.empty((rows.stop - rows.start, self.keys.shape[1]), self.query.dtype)
        np.multiply(self.query[rows], self.scale, out=queries[:, :-2])
        queries[:, -2], queries[:, -1] = query_bias, 1.0
        causal_offset = self.num_keys - self.num_queries  # the last query sees the last key
        visible = min(self.num_keys, max(0, rows.stop + causal_offset)) if self.causal else self.num_keys
        for columns in _blocks(visible, _KEYS):
            shape = (len(queries), columns.stop - columns.start)
            tile = self.scores[: shape[0] * shape[1]].reshape(shape)
            np.matmul(queries, self.keys[columns].T, out=tile)
            if self.causal and columns.stop - 1 > rows.start + causal_offset:
                last_visible = np.arange(rows.start, rows.stop)[:, None] + causal_offset
                tile[np.arange(columns.start, columns.stop) > last_visible] = _MASKED
            yield columns, tile

    def weighted_sums(self, rows: slice, shift: Any) -> tuple[Any, Any]:
        """Return the sums over keys of exp(score - shift) times the values, (queries, value_dim), and of exp alone."""
        total = np.zeros((rows.stop - rows.start, self.values.shape[1]), self.values.dtype)
        for columns, tile in self.tiles(rows, -shift):
            total += np.exp(tile, out=tile) @ self.values[columns]
        return total[:, :-1], total[:, -1]

    def max_scores(self, rows: slice) -> Any:
        """Return the largest score of each query, and zero for a fully masked row."""
        top = np.full(rows.stop - rows.start, _MASKED, self.query.dtype)
        for _, tile in self.tiles(rows, 0.0):
            np.maximum(top, tile.max(axis=1), out=top)
        return np.where(top > 0.5 * _MASKED, top, top.dtype.type(0.0))

    def forward(self, out: Any, logsumexp: Any) -> None:
        """Write the output, (queries, value_dim), and the logsumexp of the scores, (queries,)."""
        max_key_norm = np.sqrt(np.vecdot(self.key, self.key).max(initial=0.0))
        bounds = np.sqrt(np.vecdot(self.query, self.query)) * (abs(self.scale) * max_key_norm)
        for rows in self.blocks():
            shift = bounds[rows]
            weighted, total = self.weighted_sums(rows, shift)
            if not total.min(initial=1.0) > np.exp(_MIN_LOG_SUM):
                shift = self.max_scores(rows)
                weighted, total = self.weighted_sums(rows, shift)
            visible = total > 0.0
            np.divide(weighted, np.where(visible, total, 1.0)[:, None], out=out[rows])
            # In a fully masked row the derivative recomputes the weights exp(-1e30) = 0.
            logsumexp[rows] = np.where(visible, shift + np.log(np.where(visible, total, 1.0)), -_MASKED)

    def backward(self, g: Any, out: Any, logsumexp: Any, dquery: Any, dkey: Any, dvalue: Any) -> None:
        """Write the cotangents, with P the weights: dV = P^T g, dS = P (g V^T - sum(g out)), dQ = dS K, dK = dS^T Q."""
        dkey[...], dvalue[...] = 0.0, 0.0
        buffer = np.empty_like(self.scores)
        for rows in self.blocks():
            cotangent = np.empty((rows.stop - rows.start, g.shape[1] + 1), g.dtype)
            cotangent[:, :-1] = g[rows]
            cotangent[:, -1] = -np.vecdot(g[rows], out[rows])
            dquery_rows = np.zeros_like(cotangent, shape=(len(cotangent), dquery.shape[1]))
            for columns, tile in self.tiles(rows, -logsumexp[rows]):
                weights = np.exp(tile, out=tile)
                dvalue[columns] += weights.T @ cotangent[:, :-1]
                dscores = buffer[: tile.size].reshape(tile.shape)
                np.matmul(cotangent, self.values[columns].T, out=dscores)
                dscores *= weights
                dquery_rows += dscores @ self.key[columns]
                dkey[columns] += dscores.T @ self.query[rows]
            np.multiply(dquery_rows, self.scale, out=dquery[rows])
        dkey *= self.scale


def _blocks(stop: int, size: int) -> Iterator[slice]:
    for first in range(0, stop, size):
        yield slice(first, min(first + size, stop))


def _heads(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return list(itertools.product(range(shape[0]), range(shape[1])))


def _key_mask(mask: Any, sentence: int) -> Any:
    """Return the mask of the keys of a sentence, (keys,), or None."""
    if mask is None:
        return None
    rows = mask.reshape(-1, mask.shape[-1])
    return rows[sentence if len(rows) > 1 else 0]


def _forward(*arrays: Any, causal: bool, scale: float, keep_probability: float, save: bool) -> tuple[Any, Any]:
    query, key, value, mask, _, _ = arrays
    out = np.empty((*query.shape[:3], value.shape[-1]), query.dtype)
    logsumexp = np.empty(query.shape[:3], query.dtype)
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:-1], key.shape[2]))

    def forward(head: tuple[int, int]) -> None:
        attention = _Head(query[head], key[head], value[head], _key_mask(mask, head[0]), scale, causal)
        attention.forward(out[head], logsumexp[head])

    parallel_for(forward, _heads(query.shape))
    return out, (query, key, value, mask, out, logsumexp)


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    query, key, value, mask, out, logsumexp = residuals
    cotangents = [np.empty(x.shape, x.dtype) for x in (query, key, value)]

    def backward(head: tuple[int, int]) -> None:
        attention = _Head(query[head], key[head], value[head], _key_mask(mask, head[0]), scale, causal)
        attention.backward(g[head], out[head], logsumexp[head], *(x[head] for x in cotangents))

    parallel_for(backward, _heads(query.shape))
    return (*cotangents, None, None, None)


register(Kernel("numpy.flash_attention", "attention", "numpy", _supports, _forward, _vjp, priority=10))
