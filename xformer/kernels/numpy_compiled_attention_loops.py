"""The loops of compiled attention; see numpy_compiled_loops for how and when they are compiled.

A tile is a block of queries against a block of keys. Matrices are copied next to each other in memory before they are
multiplied; `added` is what masks and biases add to the scores, `keep` a mask of dropout, both without elements where
there is none.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numba.types import boolean, float32, int64

from xformer.kernels.numpy_compiled_loops import (
    LOWEST,
    ONE,
    REORDERED,
    SETTINGS,
    ZERO,
    exp,
    given,
    loop,
    made,
    ordered,
    unordered,
)

# Of a tile. OpenBLAS multiplies matrices of up to a million products as they lie, half as fast again as larger ones,
# unless the right one is transposed.
_QUERIES, _KEYS, _PRODUCTS = 64, 128, 1_000_000
_piece = njit(fastmath=REORDERED, **SETTINGS)  # what the two loops are made of
_LANES = 32  # how many numbers a compiled loop takes at once; what is left over, it takes one by one
_NEVER = np.float32(-1e30)  # the largest score of no keys: finite, since infinity minus itself is NaN
_HIDDEN = np.float32(-3e38)  # the score of a key that is not seen: its exponential is zero, even relative to _NEVER


@_piece
def _scaled(x, scale, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * scale


@_piece
def _store(x, scale, y, b, h, first):
    """Write rows of one head, scaled, into (batch, length, heads, features)."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[b, first + i, h, j] = x[i, j] * scale


@_piece
def _tile_keys(features):
    return max(_LANES, min(_KEYS, _PRODUCTS // (_QUERIES * features) // _LANES * _LANES))


@_piece
def _padded(keys):
    return -(-keys // _LANES) * _LANES


@_piece
def _transpose(x, step, y):
    """Blocks of `step` rows of x, each transposed, one after the other in y, which may have zeros for more rows."""
    rows, features = x.shape
    for first in range(0, rows, step):
        block = _block(y, first, min(step, y.size // features - first), features)
        for j in range(features):
            for i in range(min(block.shape[1], rows - first)):
                block[j, i] = x[first + i, j]


@_piece
def _block(y, first, count, features):
    """The block of a transposed matrix that begins at row `first`: (features, count)."""
    return y[first * features : (first + count) * features].reshape((features, count))


@_piece
def _add(x, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += y[i, j]


@_piece
def _bias(tile, added):
    """Add (queries or 1, keys) to a tile."""
    for i in range(tile.shape[0]):
        row, plus = tile[i], added[min(i, added.shape[0] - 1)]
        for j in range(plus.size):
            row[j] += plus[j]


@_piece
def _weigh(tile, top, total, factor):
    """Turn scores into exponentials relative to the largest so far; `factor` is what the sums before shrink by."""
    for i in range(tile.shape[0]):
        row, largest, more = tile[i], LOWEST, ZERO
        for j in range(tile.shape[1]):
            largest = max(largest, ordered(row[j]))
        new = unordered(max(largest, ordered(top[i])))
        for j in range(tile.shape[1]):
            row[j] = exp(row[j] - new)
            more += row[j]
        factor[i] = exp(top[i] - new)
        total[i] = total[i] * factor[i] + more
        top[i] = new


@_piece
def _drop(tile, keep, scale):
    for i in range(tile.shape[0]):
        row, kept = tile[i], keep[i]
        for j in range(kept.size):
            row[j] = row[j] * scale if kept[j] else ZERO


@_piece
def _gather(sums, factor, part):
    for i in range(sums.shape[0]):
        for j in range(sums.shape[1]):
            sums[i, j] = sums[i, j] * factor[i] + part[i, j]


@_piece
def _divide(sums, top, total, out, log_sums, b, h, first):
    """A query that sees no key gets zeros, and a logarithm by which all its weights are zero."""
    for i in range(sums.shape[0]):
        inverse = ONE / total[i] if total[i] > ZERO else ZERO
        log_sums[b, h, first + i] = top[i] + math.log(total[i]) if total[i] > ZERO else -_NEVER
        for j in range(sums.shape[1]):
            out[b, first + i, h, j] = sums[i, j] * inverse


@_piece
def _weights(tile, log_sums):
    for i in range(tile.shape[0]):
        row, log_sum = tile[i], log_sums[i]
        for j in range(tile.shape[1]):
            row[j] = exp(row[j] - log_sum)


@_piece
def _softmax_vjp(weights, dweights, along):
    for i in range(weights.shape[0]):
        row, to = weights[i], dweights[i]
        for j in range(weights.shape[1]):
            to[j] = row[j] * (to[j] - along[i])


@_piece
def _inner(g, out, b, h, first, copy, sums):
    """The inner products of a head's rows, and a copy of those of g."""
    for i in range(copy.shape[0]):
        total = ZERO
        for j in range(copy.shape[1]):
            copy[i, j] = g[b, first + i, h, j]
            total += copy[i, j] * out[b, first + i, h, j]
        sums[i] = total


@_piece
def _scores(queries, keys, added, real, first_seen, tile):
    """The scores of a tile, of whose keys `real` are real. keys: transposed; added: (queries or 1, keys), or nothing.

    first_seen: how many keys the first query sees; each further query sees one more.
    """
    np.dot(queries, keys, tile)
    if added.size > 0:
        _bias(tile, added)
    if first_seen < tile.shape[1] or real < tile.shape[1]:
        for i in range(tile.shape[0]):
            for j in range(min(real, max(0, first_seen + i)), tile.shape[1]):
                tile[i, j] = _HIDDEN


@_piece
def _part(added, b, h, q, k, count, real):
    """What is added to `count` queries from q on and `real` keys from k on; the first three axes may be 1."""
    of = added[max(0, min(b, added.shape[0] - 1)), max(0, min(h, added.shape[1] - 1))]
    first = q if of.shape[0] > 1 else 0
    return of[first : first + count, k : k + real]


_ARGUMENTS = (
    *[given(4)] * 4, given(4, boolean), boolean, float32, float32,
)  # fmt: skip


@loop(*_ARGUMENTS, made(4), made(3), int64, int64)
def attend(query, key, value, added, keep, causal, scale, keep_scale, out, log_sums, first, last):
    """Heads `first` to `last` of all sentences. out: (batch, queries, heads, value_dim); log_sums: (batch, heads,
    queries)."""
    heads, queries, keys, width = query.shape[1], query.shape[2], key.shape[2], value.shape[3]
    features, step, padded = query.shape[3], _tile_keys(max(query.shape[3], width)), _padded(keys)
    q_tile, k_all = np.empty((_QUERIES, features), np.float32), np.zeros(padded * features, np.float32)
    v_all, scores = np.zeros((padded, width), np.float32), np.empty(_QUERIES * step, np.float32)
    sums, part = np.empty((_QUERIES, width), np.float32), np.empty((_QUERIES, width), np.float32)
    top, total, factor = np.empty(_QUERIES, np.float32), np.empty(_QUERIES, np.float32), np.empty(_QUERIES, np.float32)
    behind = keys - queries  # the last query sees the last key
    for head in range(first, last):
        b, h = head // heads, head % heads
        _transpose(key[b, h], step, k_all)
        _scaled(value[b, h], ONE, v_all)
        for q in range(0, queries, _QUERIES):
            n = min(_QUERIES, queries - q)
            _scaled(query[b, h, q : q + n], scale, q_tile)
            top[:], total[:], sums[:] = _NEVER, ZERO, ZERO
            for k in range(0, max(0, q + n + behind) if causal else keys, step):
                m, real = min(step, padded - k), min(step, keys - k)
                tile, seen = scores[: n * m].reshape((n, m)), q + behind + 1 - k if causal else real
                _scores(q_tile[:n], _block(k_all, k, m, features), _part(added, b, h, q, k, n, real), real, seen, tile)
                _weigh(tile, top, total, factor)
                if keep.size > 0:
                    _drop(tile, keep[b, h, q : q + n, k : k + real], keep_scale)
                np.dot(tile, v_all[k : k + m], part[:n])
                _gather(sums[:n], factor, part)
            _divide(sums[:n], top, total, out, log_sums, b, h, q)


@loop(*_ARGUMENTS, given(4), given(3), given(4), *[made(4)] * 4, int64, int64)
def pull_back(
    query, key, value, added, keep, causal, scale, keep_scale, out, log_sums,
    g, dquery, dkey, dvalue, dbias, first, last,
):  # fmt: skip
    """With P the weights and P' what dropout leaves of them: dV = P' g, dS = P (dP - sum(g out)), where dP is the part
    of g V' that was kept; dQ = dS K, dK = dS' Q."""
    heads, queries, keys, features, width = query.shape[1], query.shape[2], key.shape[2], query.shape[3], value.shape[3]
    q_tile, g_tile = np.empty((_QUERIES, features), np.float32), np.empty((_QUERIES, width), np.float32)
    step, padded, behind = _tile_keys(max(features, width)), _padded(keys), keys - queries
    k_all, k_turned = np.zeros((padded, features), np.float32), np.zeros(padded * features, np.float32)
    v_turned, dv = np.zeros(padded * width, np.float32), np.empty((padded, width), np.float32)
    dq, dk = np.empty_like(q_tile), np.empty_like(k_all)
    more_q, more_k = np.empty_like(q_tile), np.empty((step, features), np.float32)
    more_v, along = np.empty((step, width), np.float32), np.empty(_QUERIES, np.float32)
    scores, dscores = np.empty(_QUERIES * step, np.float32), np.empty(_QUERIES * step, np.float32)
    for head in range(first, last):
        b, h = head // heads, head % heads
        _scaled(key[b, h], ONE, k_all)
        _transpose(key[b, h], step, k_turned)
        _transpose(value[b, h], step, v_turned)
        dk[:], dv[:] = ZERO, ZERO
        for q in range(0, queries, _QUERIES):
            n = min(_QUERIES, queries - q)
            _scaled(query[b, h, q : q + n], scale, q_tile)
            _inner(g, out, b, h, q, g_tile[:n], along)
            dq[:] = ZERO
            for k in range(0, max(0, q + n + behind) if causal else keys, step):
                m, real = min(step, padded - k), min(step, keys - k)
                seen = q + behind + 1 - k if causal else real
                tile, dtile = scores[: n * m].reshape((n, m)), dscores[: n * m].reshape((n, m))
                _scores(
                    q_tile[:n], _block(k_turned, k, m, features), _part(added, b, h, q, k, n, real), real, seen, tile
                )
                _weights(tile, log_sums[b, h, q : q + n])
                np.dot(g_tile[:n], _block(v_turned, k, m, width), dtile)
                if keep.size > 0:
                    _drop(dtile, keep[b, h, q : q + n, k : k + real], keep_scale)
                _softmax_vjp(tile, dtile, along)
                if keep.size > 0:
                    _drop(tile, keep[b, h, q : q + n, k : k + real], keep_scale)
                np.dot(tile.T, g_tile[:n], more_v[:m])
                np.dot(dtile, k_all[k : k + m], more_q[:n])
                np.dot(dtile.T, q_tile[:n], more_k[:m])
                _add(dv[k : k + m], more_v)
                _add(dq[:n], more_q)
                _add(dk[k : k + m], more_k)
                if dbias.size > 0:
                    dbias[b, h, q : q + n, k : k + real] = dtile[:, :real]
            _store(dq[:n], scale, dquery, b, h, q)
        _store(dk[:keys], ONE, dkey, b, h, 0)
        _store(dv[:keys], ONE, dvalue, b, h, 0)
