"""The loops of compiled attention; see numpy_compiled_loops for how and when it is compiled.

Queries come in blocks of _QUERIES, keys in tiles of _KEYS; numpy_compiled_tiles says how their products are made, and
what blocks and panels are. `added` is what masks and biases add to the scores, `keep` a mask of dropout, both without
elements where there is none.
"""

from __future__ import annotations

import math

import numpy as np
from numba.types import boolean, float32, int64

from xformer.kernels.numpy_compiled_loops import LOWEST, ONE, ZERO, exp, given, loop, made, ordered, unordered
from xformer.kernels.numpy_compiled_tiles import (
    COLUMNS,
    ROWS,
    STEP,
    aligned,
    multiply,
    pack_panels,
    padded,
    piece,
    turn,
)

_QUERIES, _KEYS = 64, 96 // COLUMNS * COLUMNS  # the scores of a tile stay in a first-level cache
_AT_ONCE = 32  # how many numbers a compiled loop takes at once; what is left over, it takes one by one
_NEVER = np.float32(-1e30)  # the largest score of no keys: finite, since infinity minus itself is NaN
_HIDDEN = np.float32(-3e38)  # the score of a key that is not seen: its exponential is zero, even relative to _NEVER


@piece
def _block(rows):
    """(rows, STEP), of which a matrix takes the first columns; zeros, since what memory holds may be slow numbers."""
    block = aligned(rows * STEP).reshape((rows, STEP))
    block[:] = ZERO
    return block


@piece
def _sums(rows, columns):
    """Room for the sums of as many rows and columns as are whole tiles."""
    sums = aligned((rows + ROWS) * padded(columns)).reshape((rows + ROWS, padded(columns)))
    sums[:] = ZERO
    return sums


@piece
def _scaled(x, scale, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * scale


@piece
def _store(x, count, scale, y, b, h, first):
    """Write rows of one head, scaled, into (batch, length, heads, features)."""
    for i in range(count):
        for j in range(y.shape[3]):
            y[b, first + i, h, j] = x[i, j] * scale


@piece
def _bias(tile, added, count):
    """Add (queries or 1, keys) to the first rows of a tile."""
    for i in range(count):
        row, plus = tile[i], added[min(i, added.shape[0] - 1)]
        for j in range(plus.size):
            row[j] += plus[j]


@piece
def _weigh(tile, wide, top, total, factor, count):
    """Turn scores into exponentials relative to the largest so far; `factor` is what the sums before shrink by."""
    for i in range(count):
        row, largest, more = tile[i], LOWEST, ZERO
        for j in range(wide):
            largest = max(largest, ordered(row[j]))
        new = unordered(max(largest, ordered(top[i])))
        for j in range(wide):
            row[j] = exp(row[j] - new)
            more += row[j]
        factor[i] = exp(top[i] - new)
        total[i] = total[i] * factor[i] + more
        top[i] = new


@piece
def _drop(tile, keep, scale):
    for i in range(keep.shape[0]):
        row, kept = tile[i], keep[i]
        for j in range(kept.size):
            row[j] = row[j] * scale if kept[j] else ZERO


@piece
def _shrink(sums, width, factor, count):
    for i in range(count):
        for j in range(width):
            sums[i, j] *= factor[i]


@piece
def _divide(sums, top, total, count, out, log_sums, b, h, first):
    """A query that sees no key gets zeros, and a logarithm by which all its weights are zero."""
    for i in range(count):
        inverse = ONE / total[i] if total[i] > ZERO else ZERO
        log_sums[b, h, first + i] = top[i] + math.log(total[i]) if total[i] > ZERO else -_NEVER
        for j in range(out.shape[3]):
            out[b, first + i, h, j] = sums[i, j] * inverse


@piece
def _weights(tile, wide, log_sums):
    for i in range(log_sums.size):
        row, log_sum = tile[i], log_sums[i]
        for j in range(wide):
            row[j] = exp(row[j] - log_sum)


@piece
def _softmax_vjp(weights, dweights, wide, along, count):
    for i in range(count):
        row, to = weights[i], dweights[i]
        for j in range(wide):
            to[j] = row[j] * (to[j] - along[i])


@piece
def _inner(g, out, b, h, first, copy, sums, count):
    """The inner products of a head's rows, and a copy of those of g."""
    for i in range(count):
        total = ZERO
        for j in range(g.shape[3]):
            copy[i, j] = g[b, first + i, h, j]
            total += copy[i, j] * out[b, first + i, h, j]
        sums[i] = total


@piece
def _wide(keys):
    """How many scores of a row are computed: those that are not of keys, as if of hidden ones."""
    return -(-keys // _AT_ONCE) * _AT_ONCE


@piece
def _hide(tile, real, first_seen, count):
    """Hide what is no key, and the keys that a query is not to see.

    first_seen: how many keys the first query sees; each further query sees one more.
    """
    wide = _wide(real)
    if first_seen < wide or real < wide:
        for i in range(count):
            for j in range(min(real, max(0, first_seen + i)), wide):
                tile[i, j] = _HIDDEN


@piece
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
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    features, width, behind = query.shape[3], value.shape[3], keys - queries  # the last query sees the last key
    k_panels, v_panels = aligned(features * padded(keys)), aligned(keys * padded(width))
    q_block, tile, sums = _block(_QUERIES), _block(_QUERIES), _block(_QUERIES)
    top, total, factor = aligned(_QUERIES), aligned(_QUERIES), aligned(_QUERIES)
    for head in range(first, last):
        b, h = head // heads, head % heads
        pack_panels(key[b, h].T, features, keys, k_panels)
        pack_panels(value[b, h], keys, width, v_panels)
        for q in range(0, queries, _QUERIES):
            n = min(_QUERIES, queries - q)
            _scaled(query[b, h, q : q + n], scale, q_block)
            top[:], total[:], sums[:n, :width] = _NEVER, ZERO, ZERO
            for k in range(0, max(0, q + n + behind) if causal else keys, _KEYS):
                m, seen = min(_KEYS, keys - k), q + behind + 1 - k if causal else keys
                right = k_panels, features, keys
                multiply(q_block.ravel(), n, right, 0, features, k, m, tile.ravel(), 0, STEP, False)
                if added.size > 0:
                    _bias(tile, _part(added, b, h, q, k, n, m), n)
                _hide(tile, m, seen, n)
                _weigh(tile, _wide(m), top, total, factor, n)
                if keep.size > 0:
                    _drop(tile, keep[b, h, q : q + n, k : k + m], keep_scale)
                if k > 0:
                    _shrink(sums, width, factor, n)
                multiply(tile.ravel(), n, (v_panels, keys, width), k, m, 0, width, sums.ravel(), 0, STEP, k > 0)
            _divide(sums, top, total, n, out, log_sums, b, h, q)


@loop(*_ARGUMENTS, given(4), given(3), given(4), *[made(4)] * 4, int64, int64)
def pull_back(
    query, key, value, added, keep, causal, scale, keep_scale, out, log_sums,
    g, dquery, dkey, dvalue, dbias, first, last,
):  # fmt: skip
    """With P the weights and P' what dropout leaves of them: dV = P' g, dS = P (dP - sum(g out)), where dP is the part
    of g V' that was kept; dQ = dS K, dK = dS' Q."""
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    features, width, behind = query.shape[3], value.shape[3], keys - queries
    k_turned, v_turned = aligned(features * padded(keys)), aligned(width * padded(keys))
    k_panels, q_panels = aligned(keys * padded(features)), aligned(_QUERIES * padded(features))
    g_panels, along = aligned(_QUERIES * padded(width)), aligned(_QUERIES)
    q_block, g_block, dq = _block(_QUERIES), _block(_QUERIES), _block(_QUERIES)
    tile, dtile, turned = _block(_QUERIES), _block(_QUERIES), _block(_KEYS)
    dk, dv = _sums(keys, features), _sums(keys, width)
    dk_step, dv_step = dk.shape[1], dv.shape[1]
    for head in range(first, last):
        b, h = head // heads, head % heads
        pack_panels(key[b, h], keys, features, k_panels)
        pack_panels(key[b, h].T, features, keys, k_turned)
        pack_panels(value[b, h].T, width, keys, v_turned)
        dk[:], dv[:] = ZERO, ZERO
        for q in range(0, queries, _QUERIES):
            n = min(_QUERIES, queries - q)
            _scaled(query[b, h, q : q + n], scale, q_block)
            _inner(g, out, b, h, q, g_block, along, n)
            pack_panels(q_block, n, features, q_panels)
            pack_panels(g_block, n, width, g_panels)
            dq[:n, :features] = ZERO
            for k in range(0, max(0, q + n + behind) if causal else keys, _KEYS):
                m, seen = min(_KEYS, keys - k), q + behind + 1 - k if causal else keys
                wide = _wide(m)
                multiply(
                    q_block.ravel(), n, (k_turned, features, keys), 0, features, k, m, tile.ravel(), 0, STEP, False
                )
                if added.size > 0:
                    _bias(tile, _part(added, b, h, q, k, n, m), n)
                _hide(tile, m, seen, n)
                _weights(tile, wide, log_sums[b, h, q : q + n])
                multiply(g_block.ravel(), n, (v_turned, width, keys), 0, width, k, m, dtile.ravel(), 0, STEP, False)
                if keep.size > 0:
                    _drop(dtile, keep[b, h, q : q + n, k : k + m], keep_scale)
                _softmax_vjp(tile, dtile, wide, along, n)
                if keep.size > 0:
                    _drop(tile, keep[b, h, q : q + n, k : k + m], keep_scale)
                multiply(dtile.ravel(), n, (k_panels, keys, features), k, m, 0, features, dq.ravel(), 0, STEP, True)
                turn(tile.ravel(), n, m, turned.ravel())
                multiply(
                    turned.ravel(), m, (g_panels, n, width), 0, n, 0, width, dv.ravel(), k * dv_step, dv_step, True
                )
                turn(dtile.ravel(), n, m, turned.ravel())
                multiply(
                    turned.ravel(),
                    m,
                    (q_panels, n, features),
                    0,
                    n,
                    0,
                    features,
                    dk.ravel(),
                    k * dk_step,
                    dk_step,
                    True,
                )
                if dbias.size > 0:
                    dbias[b, h, q : q + n, k : k + m] = dtile[:n, :m]
            _store(dq, n, scale, dquery, b, h, q)
        _store(dk, keys, ONE, dkey, b, h, 0)
        _store(dv, keys, ONE, dvalue, b, h, 0)
