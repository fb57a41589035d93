"""Attention on NumPy for long sequences: scores exist a tile at a time, so memory grows with the length alone.

The idea is that of flash attention (Dao et al., 2022), with a core's cache in the place of a GPU's shared memory. What
has to be added to all scores of a query or of a key stands in columns beside the features, so that products add it:
minus an upper bound of a query's scores (the norms of the query and of the longest key), and what makes the
exponential of a masked key zero. A column of ones beside the values makes the product with them give the sums of the
rows, too. That leaves the exponential as the only pass over a tile. Where the bound is so loose that sums underflow,
the largest scores are looked for in a pass before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.kernels.numpy import attention as numpy_attention  # registers first, and so comes second
from xformer.kernels.registry import Kernel, register
from xformer.threads import parallel_for

_LEAST_SCORES = 128 * 128  # of a head; fewer are kept whole, by the kernel for short sequences
_QUERIES, _KEYS = 256, 512  # of a tile: half a megabyte of float32
_NEVER = -1e30  # added to a score: its exponential is zero; unlike infinity it makes no NaN in a product
_LEAST_LOG_SUM = -60.0  # what the exponential makes of smaller numbers would lose digits


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    query, key, _, mask, bias, keep = arrays
    reason = numpy_attention.supports(arrays, static)
    if reason is not None:
        return reason
    if bias is not None or keep is not None:
        return "it has a bias or dropout of its weights"
    if mask is not None and any(size != 1 for size in mask.shape[-3:-1]):
        return "the mask is not one of keys alone"
    if query.shape[2] * key.shape[2] < _LEAST_SCORES:
        return f"a head has less than {_LEAST_SCORES} scores"
    return None


class _Head:
    """One head of one sentence. allowed: of each key, or None; scale: of the scores."""

    def __init__(self, query: Any, key: Any, value: Any, allowed: Any, scale: float, causal: bool) -> None:
        self.query, self.scale, self.causal = query, scale, causal
        (self.num_queries, features), self.num_keys = query.shape, len(key)
        if allowed is not None:
            key = np.where(allowed[:, None], key, key.dtype.type(0.0))  # whatever stands there
        self.key = key
        self.keys = np.empty((self.num_keys, features + 2), key.dtype)
        self.keys[:, :features] = key
        self.keys[:, -2] = 1.0
        self.keys[:, -1] = 0.0 if allowed is None else np.where(allowed, 0.0, _NEVER)
        self.values = np.ones((self.num_keys, value.shape[1] + 1), value.dtype)
        self.values[:, :-1] = value
        self.scores = np.empty(_QUERIES * _KEYS, query.dtype)

    def blocks(self) -> Iterator[slice]:
        """Blocks of queries."""
        return _blocks(self.num_queries, _QUERIES)

    def tiles(self, rows: slice, added: Any) -> Iterator[tuple[slice, Any]]:
        """The scores of a block of queries, plus `added` for each query, a block of keys at a time, in one buffer."""
        queries = np.empty((rows.stop - rows.start, self.keys.shape[1]), self.query.dtype)
        np.multiply(self.query[rows], self.scale, out=queries[:, :-2])
        queries[:, -2], queries[:, -1] = added, 1.0
        behind = self.num_keys - self.num_queries  # the last query sees the last key
        seen = min(self.num_keys, max(0, rows.stop + behind)) if self.causal else self.num_keys
        for columns in _blocks(seen, _KEYS):
            shape = (len(queries), columns.stop - columns.start)
            tile = self.scores[: shape[0] * shape[1]].reshape(shape)
            np.matmul(queries, self.keys[columns].T, out=tile)
            if self.causal and columns.stop - 1 > rows.start + behind:
                late = np.arange(columns.start, columns.stop) > np.arange(rows.start, rows.stop)[:, None] + behind
                tile[late] = _NEVER
            yield columns, tile

    def weigh(self, rows: slice, shift: Any) -> tuple[Any, Any]:
        """Sums over keys of exp(score - shift) times the values: (queries, value_dim), and of exp alone."""
        total = np.zeros((rows.stop - rows.start, self.values.shape[1]), self.values.dtype)
        for columns, tile in self.tiles(rows, -shift):
            total += np.exp(tile, out=tile) @ self.values[columns]
        return total[:, :-1], total[:, -1]

    def largest(self, rows: slice) -> Any:
        """The largest score of each query; zero where no key may be seen."""
        top = np.full(rows.stop - rows.start, _NEVER, self.query.dtype)
        for _, tile in self.tiles(rows, 0.0):
            np.maximum(top, tile.max(axis=1), out=top)
        return np.where(top > 0.5 * _NEVER, top, top.dtype.type(0.0))

    def attend(self, out: Any, log_sums: Any) -> None:
        """Write the output (queries, value_dim), and the logarithms of the sums of exponentials (queries,)."""
        longest = np.sqrt(np.vecdot(self.key, self.key).max(initial=0.0))
        bounds = np.sqrt(np.vecdot(self.query, self.query)) * (abs(self.scale) * longest)
        for rows in self.blocks():
            shift = bounds[rows]
            weighted, total = self.weigh(rows, shift)
            if not total.min(initial=1.0) > np.exp(_LEAST_LOG_SUM):
                shift = self.largest(rows)
                weighted, total = self.weigh(rows, shift)
            seen = total > 0.0
            np.divide(weighted, np.where(seen, total, 1.0)[:, None], out=out[rows])
            # A query that sees no key has weights exp(-1e30) = 0.
            log_sums[rows] = np.where(seen, shift + np.log(np.where(seen, total, 1.0)), -_NEVER)

    def pull_back(self, g: Any, out: Any, log_sums: Any, dquery: Any, dkey: Any, dvalue: Any) -> None:
        """Write the cotangents, with P the weights: dV = P' g, dS = P (g V' - sum(g out)), dQ = dS K, dK = dS' Q."""
        dkey[...], dvalue[...] = 0.0, 0.0
        buffer = np.empty_like(self.scores)
        for rows in self.blocks():
            cotangent = np.empty((rows.stop - rows.start, g.shape[1] + 1), g.dtype)
            cotangent[:, :-1] = g[rows]
            cotangent[:, -1] = -np.vecdot(g[rows], out[rows])
            dquery_rows = np.zeros_like(cotangent, shape=(len(cotangent), dquery.shape[1]))
            for columns, tile in self.tiles(rows, -log_sums[rows]):
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


def _allowed(mask: Any, sentence: int) -> Any:
    """Which keys a sentence may attend to: (keys,), or None."""
    if mask is None:
        return None
    rows = mask.reshape(-1, mask.shape[-1])
    return rows[sentence if len(rows) > 1 else 0]


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
    out = np.empty((*query.shape[:3], value.shape[-1]), query.dtype)
    log_sums = np.empty(query.shape[:3], query.dtype)
    if mask is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:-1], key.shape[2]))

    def attend(place: tuple[int, int]) -> None:
        head = _Head(query[place], key[place], value[place], _allowed(mask, place[0]), scale, causal)
        head.attend(out[place], log_sums[place])

    parallel_for(attend, _heads(query.shape))
    return out, (query, key, value, mask, out, log_sums)


def _vjp(g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float) -> tuple[Any, ...]:
    query, key, value, mask, out, log_sums = residuals
    cotangents = [np.empty(x.shape, x.dtype) for x in (query, key, value)]

    def pull_back(place: tuple[int, int]) -> None:
        head = _Head(query[place], key[place], value[place], _allowed(mask, place[0]), scale, causal)
        head.pull_back(g[place], out[place], log_sums[place], *(x[place] for x in cotangents))

    parallel_for(pull_back, _heads(query.shape))
    return (*cotangents, None, None, None)


register(Kernel("numpy.flash_attention", "attention", "numpy", _supports, _forward, _vjp, priority=10))
