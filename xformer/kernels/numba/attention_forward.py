"""The loops of compiled attention; see loops for how and when it is compiled.

Queries come in blocks of QUERIES, keys in tiles of KEYS; microkernel says how their products are made, and
what blocks and panels are. `added` is what masks and biases add to the scores, `keep` a mask of dropout, both without
elements where there is none.
"""

from __future__ import annotations

import math

import numpy as np
from numba.types import Array, boolean, float32

from xformer.kernels.numba.loops import LOWEST, ONE, ZERO, exp, given, loop, made, ordered, unordered, worker
from xformer.kernels.numba.microkernel import COLUMNS, STEP, aligned, memory, multiply, pack_panels, padded, piece
from xformer.kernels.numba.thread_pool_loops import SHARED, arguments, next_part, share, words_of

QUERIES, KEYS = 64, 96 // COLUMNS * COLUMNS  # the scores of a tile stay in a first-level cache
_AT_ONCE = 32  # how many numbers a compiled loop takes at once; what is left over, it takes one by one
_NEVER = np.float32(-1e30)  # the largest score of no keys: finite, since infinity minus itself is NaN
_HIDDEN = np.float32(-3e38)  # the score of a key that is not seen: its exponential is zero, even relative to _NEVER


@piece
def zero_block(rows):
    """(rows, STEP), of which a matrix takes the first columns; zeros, since what memory holds may be slow numbers."""
    block = aligned(rows * STEP).reshape((rows, STEP))
    block[:] = ZERO
    return block


@piece
def scaled(x, scale, y):
    """y = x times the scale, of a block the first rows and columns."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * scale


@piece
def add_bias(tile, added, count):
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
def drop(tile, keep, scale):
    """Zero what is not kept, and scale the rest."""
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
def wide_of(keys):
    """How many scores of a row are computed: those that are not of keys, as if of hidden ones."""
    return -(-keys // _AT_ONCE) * _AT_ONCE


@piece
def hide(tile, real, first_seen, count):
    """Hide what is no key, and the keys that a query is not to see.

    first_seen: how many keys the first query sees; each further query sees one more.
    """
    wide = wide_of(real)
    if first_seen < wide or real < wide:
        for i in range(count):
            for j in range(min(real, max(0, first_seen + i)), wide):
                tile[i, j] = _HIDDEN


@piece
def part_of(added, b, h, q, k, count, real):
    """What is added to `count` queries from q on and `real` keys from k on; the first three axes may be 1."""
    of = added[max(0, min(b, added.shape[0] - 1)), max(0, min(h, added.shape[1] - 1))]
    first = q if of.shape[0] > 1 else 0
    return of[first : first + count, k : k + real]


_HEADS = Array(float32, 4, "A", readonly=True)  # of which the features are contiguous
# Query, key, value, added, keep, causal, scale, keep_scale.
COMMON = _HEADS, _HEADS, _HEADS, given(4), given(4, boolean), boolean, float32, float32
_ATTEND = *COMMON, made(4), made(3)
_ONCE = _HEADS, _HEADS, _HEADS, given(4), float32, made(4)
_attend, _once = arguments(*_ATTEND), arguments(*_ONCE)


@worker
def attend_parts(job):
    """Attention of some heads. out: (batch, queries, heads, value_dim); log_sums: (batch, heads, queries)."""
    words = words_of(job)
    query, key, value, added, keep, causal, scale, keep_scale, out, log_sums = _attend(words)
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    features, width, behind = query.shape[3], value.shape[3], keys - queries  # the last query sees the last key
    k_panels, v_panels = aligned(features * padded(keys)), aligned(keys * padded(width))
    q_block, tile, sums = zero_block(QUERIES), zero_block(QUERIES), zero_block(QUERIES)
    top, total, factor = aligned(QUERIES), aligned(QUERIES), aligned(QUERIES)
    head = next_part(words)
    while head >= 0:
        b, h = head // heads, head % heads
        pack_panels(key[b, h].T, features, keys, k_panels)
        pack_panels(value[b, h], keys, width, v_panels)
        for q in range(0, queries, QUERIES):
            n = min(QUERIES, queries - q)
            scaled(query[b, h, q : q + n], scale, q_block)
            top[:], total[:], sums[:n, :width] = _NEVER, ZERO, ZERO
            for k in range(0, max(0, q + n + behind) if causal else keys, KEYS):
                m, seen = min(KEYS, keys - k), q + behind + 1 - k if causal else keys
                right = k_panels, features, keys
                multiply(q_block.ravel(), n, right, 0, features, k, m, tile.ravel(), 0, STEP, False)
                if added.size > 0:
                    add_bias(tile, part_of(added, b, h, q, k, n, m), n)
                hide(tile, m, seen, n)
                _weigh(tile, wide_of(m), top, total, factor, n)
                if keep.size > 0:
                    drop(tile, keep[b, h, q : q + n, k : k + m], keep_scale)
                if k > 0:
                    _shrink(sums, width, factor, n)
                multiply(tile.ravel(), n, (v_panels, keys, width), k, m, 0, width, sums.ravel(), 0, STEP, k > 0)
            _divide(sums, top, total, n, out, log_sums, b, h, q)
        head = next_part(words)


@piece
def _inner_product(x, y, at):
    """Of x and what begins so many bytes into y."""
    total, first = ZERO, np.uint64(at // 4)
    for j in range(x.size):
        total += x[j] * y[first + np.uint64(j)]  # a signed index might count from the end, which vectors cannot
    return total


@piece
def _add(sums, weight, x, at):
    first = np.uint64(at // 4)
    for j in range(sums.size):
        sums[j] += weight * x[first + np.uint64(j)]


@worker
def attend_once_parts(job):
    """Attention of a single query in some heads, which leaves keys and values where they are.

    out: (batch, 1, heads, value_dim). The features of keys and of values are contiguous.
    """
    words = words_of(job)
    query, key, value, added, scale, out = _once(words)
    (_, heads, keys, features), width = key.shape, value.shape[3]
    all_keys, all_values, wide = memory(key), memory(value), wide_of(keys)
    q, tile, sums = aligned(features), aligned(wide).reshape((1, wide)), aligned(width)
    top, total, factor = aligned(1), aligned(1), aligned(1)
    head = next_part(words)
    while head >= 0:
        b, h = head // heads, head % heads
        for j in range(features):
            q[j] = query[b, h, 0, j] * scale
        for k in range(keys):
            tile[0, k] = _inner_product(q, all_keys, b * key.strides[0] + h * key.strides[1] + k * key.strides[2])
        if added.size > 0:
            add_bias(tile, part_of(added, b, h, 0, 0, 1, keys), 1)
        hide(tile, keys, keys, 1)
        top[0], total[0], sums[:] = _NEVER, ZERO, ZERO
        _weigh(tile, wide, top, total, factor, 1)
        inverse = ONE / total[0] if total[0] > ZERO else ZERO
        for k in range(keys):
            weight = tile[0, k] * inverse
            _add(sums, weight, all_values, b * value.strides[0] + h * value.strides[1] + k * value.strides[2])
        for j in range(width):
            out[b, 0, h, j] = sums[j]
        head = next_part(words)


@loop(*SHARED, *_ATTEND)
def attend(pool, helpers, parts, worker, query, key, value, added, keep, causal, scale, keep_scale, out, log_sums):
    """Attention, its heads shared."""
    arguments = query, key, value, added, keep, causal, scale, keep_scale, out, log_sums
    share(pool, helpers, parts, worker, arguments)


@loop(*SHARED, *_ONCE)
def attend_once(pool, helpers, parts, worker, query, key, value, added, scale, out):
    """Attention of a single query, likewise."""
    share(pool, helpers, parts, worker, (query, key, value, added, scale, out))
