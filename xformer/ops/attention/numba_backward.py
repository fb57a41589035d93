"""The compiled derivative of attention; numba_forward describes blocks, tiles and arguments."""

from __future__ import annotations

from xformer.ops._numba.compile import in_array, inline, out_array, parallel_body
from xformer.ops._numba.microkernel import ROWS, STEP, aligned, multiply, pack_panels, padded, transpose
from xformer.ops._numba.thread_pool import job_state, next_part, parallel_kernel
from xformer.ops._numba.vector_math import ONE, ZERO, exp
from xformer.ops.attention.numba_forward import (
    COMMON_TYPES,
    KEYS,
    QUERIES,
    add_bias,
    apply_dropout,
    bias_tile,
    copy_scaled,
    mask_out,
    padded_width,
    zero_block,
)

_TYPES = *COMMON_TYPES, in_array(4), in_array(4), in_array(4), *[out_array(4)] * 4
backward, _load_args = parallel_kernel(*_TYPES)


@inline
def _zero_sums(rows, columns):
    """Allocate zeros for (rows, columns) sums, padded to whole tiles."""
    sums = aligned((rows + ROWS) * padded(columns)).reshape((rows + ROWS, padded(columns)))
    sums[:] = ZERO
    return sums


@inline
def _write_scaled(x, count, scale, y, b, h, first):
    """Write `count` scaled rows of one head to (batch, length, heads, features)."""
    for i in range(count):
        for j in range(y.shape[3]):
            y[b, first + i, h, j] = x[i, j] * scale


@inline
def _softmax(tile, width, top, inverse):
    for i in range(top.size):
        row, row_top, row_inverse = tile[i], top[i], inverse[i]
        for j in range(width):
            row[j] = exp(row[j] - row_top) * row_inverse


@inline
def _softmax_vjp(weights, dweights, width, delta, count):
    for i in range(count):
        row, dweights_row = weights[i], dweights[i]
        for j in range(width):
            dweights_row[j] = row[j] * (dweights_row[j] - delta[i])


@inline
def _copy_and_dot(g, out, b, h, first, g_block, delta, count):
    """Copy rows of g to a block, and write their dot products with the rows of `out` to delta."""
    for i in range(count):
        total = ZERO
        for j in range(g.shape[3]):
            g_block[i, j] = g[b, first + i, h, j]
            total += g_block[i, j] * out[b, first + i, h, j]
        delta[i] = total


@parallel_body
def backward_parts(job):
    """Compute the cotangents of attention; a part is a head.

    With P the weights, P' the weights after dropout, and dP the cotangent of P, which is g V' times the dropout mask
    and its scale: dV = P'^T g, dS = P (dP - delta), where delta = sum(g out); dQ = dS K, dK = dS^T Q.
    """
    state = job_state(job)
    (
        query, key, value, attn_bias, dropout_mask, causal, scale, dropout_scale,
        out, statistics, g, dquery, dkey, dvalue, dbias,
    ) = _load_args(state)  # fmt: skip
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    features, value_dim, causal_offset = query.shape[3], value.shape[3], keys - queries
    kt_panels, vt_panels = aligned(features * padded(keys)), aligned(value_dim * padded(keys))
    k_panels, q_panels = aligned(keys * padded(features)), aligned(QUERIES * padded(features))
    g_panels, delta = aligned(QUERIES * padded(value_dim)), aligned(QUERIES)
    q_block, g_block, dq = zero_block(QUERIES), zero_block(QUERIES), zero_block(QUERIES)
    tile, dtile, transposed = zero_block(QUERIES), zero_block(QUERIES), zero_block(KEYS)
    dk, dv = _zero_sums(keys, features), _zero_sums(keys, value_dim)
    dk_step, dv_step = dk.shape[1], dv.shape[1]
    head = next_part(state)
    while head >= 0:
        b, h = head // heads, head % heads
        pack_panels(key[b, h], keys, features, k_panels)
        pack_panels(key[b, h].T, features, keys, kt_panels)
        pack_panels(value[b, h].T, value_dim, keys, vt_panels)
        dk[:], dv[:] = ZERO, ZERO
        for q in range(0, queries, QUERIES):
            n = min(QUERIES, queries - q)
            copy_scaled(query[b, h, q : q + n], scale, q_block)
            _copy_and_dot(g, out, b, h, q, g_block, delta, n)
            pack_panels(q_block, n, features, q_panels)
            pack_panels(g_block, n, value_dim, g_panels)
            dq[:n, :features] = ZERO
            for k in range(0, max(0, q + n + causal_offset) if causal else keys, KEYS):
                m, visible = min(KEYS, keys - k), q + causal_offset + 1 - k if causal else keys
                width = padded_width(m)
                right = kt_panels, features, keys
                multiply(q_block.ravel(), n, right, 0, features, k, m, tile.ravel(), 0, STEP, False)
                if attn_bias.size > 0:
                    add_bias(tile, bias_tile(attn_bias, b, h, q, k, n, m), n)
                mask_out(tile, m, visible, n)
                _softmax(tile, width, statistics[0, b, h, q : q + n], statistics[1, b, h, q : q + n])
                right = vt_panels, value_dim, keys
                multiply(g_block.ravel(), n, right, 0, value_dim, k, m, dtile.ravel(), 0, STEP, False)
                if dropout_mask.size > 0:
                    apply_dropout(dtile, dropout_mask[b, h, q : q + n, k : k + m], dropout_scale)
                _softmax_vjp(tile, dtile, width, delta, n)
                if dropout_mask.size > 0:
                    apply_dropout(tile, dropout_mask[b, h, q : q + n, k : k + m], dropout_scale)
                right = k_panels, keys, features
                multiply(dtile.ravel(), n, right, k, m, 0, features, dq.ravel(), 0, STEP, True)
                transpose(tile.ravel(), n, m, transposed.ravel())
                right = g_panels, n, value_dim
                multiply(transposed.ravel(), m, right, 0, n, 0, value_dim, dv.ravel(), k * dv_step, dv_step, True)
                transpose(dtile.ravel(), n, m, transposed.ravel())
                right = q_panels, n, features
                multiply(transposed.ravel(), m, right, 0, n, 0, features, dk.ravel(), k * dk_step, dk_step, True)
                if dbias.size > 0:
                    dbias[b, h, q : q + n, k : k + m] = dtile[:n, :m]
            _write_scaled(dq, n, scale, dquery, b, h, q)
        _write_scaled(dk, keys, ONE, dkey, b, h, 0)
        _write_scaled(dv, keys, ONE, dvalue, b, h, 0)
        head = next_part(state)
