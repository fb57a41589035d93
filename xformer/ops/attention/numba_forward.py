"""Compiled attention.

Queries are taken in blocks of QUERIES, keys in tiles of KEYS; microkernel describes how they are multiplied, and what
blocks and panels are. `attn_bias` is the sum of mask and bias, which is added to the scores; `dropout_mask` is True
where a weight is kept. Both are empty if absent.
"""

from __future__ import annotations

import numpy as np
from numba.types import Array, boolean, float32

from xformer.ops._numba.compile import in_array, inline, out_array, parallel_body
from xformer.ops._numba.microkernel import COLUMNS, STEP, aligned, memory, multiply, pack_panels, padded
from xformer.ops._numba.thread_pool import job_state, next_part, parallel_kernel
from xformer.ops._numba.vector_math import (
    MIN_SORTABLE_INT,
    ONE,
    ZERO,
    exp,
    float_to_sortable_int,
    sortable_int_to_float,
)

QUERIES, KEYS = 64, 96 // COLUMNS * COLUMNS  # the scores of a tile fit in a first-level cache
_UNROLLED = 32  # elements per iteration of a vectorized loop; the remainder would be computed one by one
_MIN_SCORE = np.finfo(np.float32).min  # initial maximum; finite, because infinity minus infinity is NaN
_MASKED = np.float32(-np.inf)  # score of a masked key: its exponential is zero, even relative to _MIN_SCORE


@inline
def zero_block(rows):
    """Allocate a (rows, STEP) block of zeros: uninitialized memory may hold slow subnormal numbers."""
    block = aligned(rows * STEP).reshape((rows, STEP))
    block[:] = ZERO
    return block


@inline
def copy_scaled(x, scale, block):
    """Write scale x to the first rows and columns of a block."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            block[i, j] = x[i, j] * scale


@inline
def add_bias(tile, bias, count):
    """Add a bias, (queries or 1, keys), to the first `count` rows of a tile."""
    for i in range(count):
        row, bias_row = tile[i], bias[min(i, bias.shape[0] - 1)]
        for j in range(bias_row.size):  # the score of a masked key may be NaN
            row[j] = row[j] + bias_row[j] if bias_row[j] > _MASKED else _MASKED


@inline
def _online_softmax(tile, width, top, total, factor, count):
    """Replace scores by exponentials relative to the maximum so far.

    top, total: running maximum and sum of exponentials of each row; factor: gets what earlier sums are multiplied by.
    """
    for i in range(count):
        row, largest, tile_total = tile[i], MIN_SORTABLE_INT, ZERO
        for j in range(width):
            largest = max(largest, float_to_sortable_int(row[j]))
        new = sortable_int_to_float(max(largest, float_to_sortable_int(top[i])))
        for j in range(width):
            row[j] = exp(row[j] - new)
            tile_total += row[j]
        factor[i] = exp(top[i] - new)
        total[i] = total[i] * factor[i] + tile_total
        top[i] = new


@inline
def apply_dropout(tile, dropout_mask, scale):
    """Multiply by the scale where the mask is True, else set to zero."""
    for i in range(dropout_mask.shape[0]):
        row, mask_row = tile[i], dropout_mask[i]
        for j in range(mask_row.size):
            row[j] = row[j] * scale if mask_row[j] else ZERO


@inline
def _rescale(sums, width, factor, count):
    for i in range(count):
        for j in range(width):
            sums[i, j] *= factor[i]


@inline
def _write_output(sums, top, total, count, out, statistics, b, h, first):
    """Divide by the sums of exponentials; a fully masked row gives zeros, also for its weights in the derivative."""
    for i in range(count):
        inverse = ZERO if total[i] == ZERO else ONE / total[i]  # in this order, NaN propagates
        statistics[0, b, h, first + i], statistics[1, b, h, first + i] = top[i], inverse
        for j in range(out.shape[3]):
            out[b, first + i, h, j] = sums[i, j] * inverse


@inline
def padded_width(keys):
    """Round a number of keys up to what a vectorized loop takes; the scores beyond are masked."""
    return -(-keys // _UNROLLED) * _UNROLLED


@inline
def mask_out(tile, keys, visible, count):
    """Mask the padding beyond `keys`, and the keys that a causal mask hides.

    visible: number of keys that the first query sees; each further query sees one more.
    """
    width = padded_width(keys)
    if visible < width or keys < width:
        for i in range(count):
            for j in range(min(keys, max(0, visible + i)), width):
                tile[i, j] = _MASKED


@inline
def bias_tile(attn_bias, b, h, q, k, num_queries, num_keys):
    """Return the bias of queries q to q + num_queries and keys k to k + num_keys; its first three axes may be 1."""
    bias = attn_bias[max(0, min(b, attn_bias.shape[0] - 1)), max(0, min(h, attn_bias.shape[1] - 1))]
    first = q if bias.shape[0] > 1 else 0
    return bias[first : first + num_queries, k : k + num_keys]


_HEADS = Array(float32, 4, "A", readonly=True)  # (batch, heads, length, features), the features contiguous
# query, key, value, attn_bias, dropout_mask, causal, scale, dropout_scale
COMMON_TYPES = _HEADS, _HEADS, _HEADS, in_array(4), in_array(4, boolean), boolean, float32, float32
_TYPES = *COMMON_TYPES, out_array(4), out_array(4)
_FEW_QUERIES_TYPES = _HEADS, _HEADS, _HEADS, in_array(4), float32, out_array(4)
forward, _load_args = parallel_kernel(*_TYPES)
forward_few_queries, _load_few_queries_args = parallel_kernel(*_FEW_QUERIES_TYPES)


@parallel_body
def forward_parts(job):
    """Compute attention; a part is a head.

    out: (batch, queries, heads, value_dim); statistics: (2, batch, heads, queries), the largest score of a query and
    the inverse of its sum of exponentials. Their logsumexp would round the sum away beside a large negative score.
    """
    state = job_state(job)
    query, key, value, attn_bias, dropout_mask, causal, scale, dropout_scale, out, statistics = _load_args(state)
    heads, queries, keys = query.shape[1], query.shape[2], key.shape[2]
    features, value_dim, causal_offset = query.shape[3], value.shape[3], keys - queries  # the last query sees all keys
    k_panels, v_panels = aligned(features * padded(keys)), aligned(keys * padded(value_dim))
    q_block, tile, sums = zero_block(QUERIES), zero_block(QUERIES), zero_block(QUERIES)
    top, total, factor = aligned(QUERIES), aligned(QUERIES), aligned(QUERIES)
    head = next_part(state)
    while head >= 0:
        b, h = head // heads, head % heads
        pack_panels(key[b, h].T, features, keys, k_panels)
        pack_panels(value[b, h], keys, value_dim, v_panels)
        for q in range(0, queries, QUERIES):
            n = min(QUERIES, queries - q)
            copy_scaled(query[b, h, q : q + n], scale, q_block)
            top[:], total[:], sums[:n, :value_dim] = _MIN_SCORE, ZERO, ZERO
            for k in range(0, max(0, q + n + causal_offset) if causal else keys, KEYS):
                m, visible = min(KEYS, keys - k), q + causal_offset + 1 - k if causal else keys
                right = k_panels, features, keys
                multiply(q_block.ravel(), n, right, 0, features, k, m, tile.ravel(), 0, STEP, False)
                if attn_bias.size > 0:
                    add_bias(tile, bias_tile(attn_bias, b, h, q, k, n, m), n)
                mask_out(tile, m, visible, n)
                _online_softmax(tile, padded_width(m), top, total, factor, n)
                if dropout_mask.size > 0:
                    apply_dropout(tile, dropout_mask[b, h, q : q + n, k : k + m], dropout_scale)
                if k > 0:
                    _rescale(sums, value_dim, factor, n)
                right = v_panels, keys, value_dim
                multiply(tile.ravel(), n, right, k, m, 0, value_dim, sums.ravel(), 0, STEP, k > 0)
            _write_output(sums, top, total, n, out, statistics, b, h, q)
        head = next_part(state)


@inline
def _dot(x, y, byte_offset):
    """Return the dot product of x with the row of y at a byte offset."""
    total, first = ZERO, np.uint64(byte_offset // 4)
    for j in range(x.size):
        total += x[j] * y[first + np.uint64(j)]  # a signed index may wrap around, which would prevent vectorization
    return total


@inline
def _add_scaled(sums, weight, x, byte_offset):
    """Add weight times the row of x at a byte offset."""
    first = np.uint64(byte_offset // 4)
    for j in range(sums.size):
        sums[j] += weight * x[first + np.uint64(j)]


@parallel_body
def forward_few_queries_parts(job):
    """Compute attention of few queries, each to all keys, without packing keys and values; a part is a head.

    out: (batch, queries, heads, value_dim). The features of keys and of values are contiguous.
    """
    state = job_state(job)
    query, key, value, attn_bias, scale, out = _load_few_queries_args(state)
    (_, heads, keys, features), queries, value_dim = key.shape, query.shape[2], value.shape[3]
    all_keys, all_values, width = memory(key), memory(value), padded_width(keys)
    q_block, tile = aligned(queries * features).reshape((queries, features)), aligned(queries * width)
    tile, sums = tile.reshape((queries, width)), aligned(queries * value_dim).reshape((queries, value_dim))
    top, total, factor = aligned(queries), aligned(queries), aligned(queries)
    head = next_part(state)
    while head >= 0:
        b, h = head // heads, head % heads
        copy_scaled(query[b, h], scale, q_block)
        for k in range(keys):
            for i in range(queries):
                tile[i, k] = _dot(q_block[i], all_keys, b * key.strides[0] + h * key.strides[1] + k * key.strides[2])
        if attn_bias.size > 0:
            add_bias(tile, bias_tile(attn_bias, b, h, 0, 0, queries, keys), queries)
        mask_out(tile, keys, keys, queries)
        top[:], total[:], sums[:] = _MIN_SCORE, ZERO, ZERO
        _online_softmax(tile, width, top, total, factor, queries)
        for k in range(keys):
            for i in range(queries):
                row = b * value.strides[0] + h * value.strides[1] + k * value.strides[2]
                _add_scaled(sums[i], tile[i, k], all_values, row)
        for i in range(queries):
            inverse = ZERO if total[i] == ZERO else ONE / total[i]
            for j in range(value_dim):
                out[b, i, h, j] = sums[i, j] * inverse
        head = next_part(state)
