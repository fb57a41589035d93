"""The loop of the derivative of compiled attention; attention_forward says what its pieces are."""

from __future__ import annotations

from xformer.kernels.numba.attention_forward import (
    COMMON,
    KEYS,
    QUERIES,
    add_bias,
    drop,
    hide,
    part_of,
    scaled,
    wide_of,
    zero_block,
)
from xformer.kernels.numba.loops import ONE, ZERO, exp, given, loop, made, worker
from xformer.kernels.numba.microkernel import ROWS, STEP, aligned, multiply, pack_panels, padded, piece, turn
from xformer.kernels.numba.thread_pool_loops import SHARED, arguments, next_part, share, words_of

_PULL_BACK = *COMMON, given(4), given(3), given(4), *[made(4)] * 4
_pull_back = arguments(*_PULL_BACK)


@piece
def _sums(rows, columns):
    """Room for the sums of as many rows and columns as are whole tiles."""
    sums = aligned((rows + ROWS) * padded(columns)).reshape((rows + ROWS, padded(columns)))
    sums[:] = ZERO
    return sums


@piece
def _store(x, count, scale, y, b, h, first):
    """Write rows of one head, scaled, into (batch, length, heads, features)."""
    for i in range(count):
        for j in range(y.shape[3]):
            y[b, first + i, h, j] = x[i, j] * scale


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


@worker
def pull_back_parts(job):
    """With P the weights and P' what dropout leaves of them: dV = P' g, dS = P (dP - sum(g out)), where dP is the part
    of g V' that was kept; dQ = dS K, dK = dS' Q."""
    words = words_of(job)
    (
        query, key, value, added, keep, causal, scale, keep_scale, out, log_sums, g, dquery, dkey, dvalue, dbias,
    ) = _pull_back(words)  # fmt: skip
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    features, width, behind = query.shape[3], value.shape[3], keys - queries
    k_turned, v_turned = aligned(features * padded(keys)), aligned(width * padded(keys))
    k_panels, q_panels = aligned(keys * padded(features)), aligned(QUERIES * padded(features))
    g_panels, along = aligned(QUERIES * padded(width)), aligned(QUERIES)
    q_block, g_block, dq = zero_block(QUERIES), zero_block(QUERIES), zero_block(QUERIES)
    tile, dtile, turned = zero_block(QUERIES), zero_block(QUERIES), zero_block(KEYS)
    dk, dv = _sums(keys, features), _sums(keys, width)
    dk_step, dv_step = dk.shape[1], dv.shape[1]
    head = next_part(words)
    while head >= 0:
        b, h = head // heads, head % heads
        pack_panels(key[b, h], keys, features, k_panels)
        pack_panels(key[b, h].T, features, keys, k_turned)
        pack_panels(value[b, h].T, width, keys, v_turned)
        dk[:], dv[:] = ZERO, ZERO
        for q in range(0, queries, QUERIES):
            n = min(QUERIES, queries - q)
            scaled(query[b, h, q : q + n], scale, q_block)
            _inner(g, out, b, h, q, g_block, along, n)
            pack_panels(q_block, n, features, q_panels)
            pack_panels(g_block, n, width, g_panels)
            dq[:n, :features] = ZERO
            for k in range(0, max(0, q + n + behind) if causal else keys, KEYS):
                m, seen = min(KEYS, keys - k), q + behind + 1 - k if causal else keys
                wide = wide_of(m)
                multiply(
                    q_block.ravel(), n, (k_turned, features, keys), 0, features, k, m, tile.ravel(), 0, STEP, False
                )
                if added.size > 0:
                    add_bias(tile, part_of(added, b, h, q, k, n, m), n)
                hide(tile, m, seen, n)
                _weights(tile, wide, log_sums[b, h, q : q + n])
                multiply(g_block.ravel(), n, (v_turned, width, keys), 0, width, k, m, dtile.ravel(), 0, STEP, False)
                if keep.size > 0:
                    drop(dtile, keep[b, h, q : q + n, k : k + m], keep_scale)
                _softmax_vjp(tile, dtile, wide, along, n)
                if keep.size > 0:
                    drop(tile, keep[b, h, q : q + n, k : k + m], keep_scale)
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
        head = next_part(words)


@loop(*SHARED, *_PULL_BACK)
def pull_back(
    pool, helpers, parts, worker, query, key, value, added, keep, causal, scale, keep_scale, out, log_sums,
    g, dquery, dkey, dvalue, dbias,
):  # fmt: skip
    """Its derivative, likewise."""
    arguments = (
        query, key, value, added, keep, causal, scale, keep_scale, out, log_sums, g, dquery, dkey, dvalue, dbias,
    )  # fmt: skip
    share(pool, helpers, parts, worker, arguments)
