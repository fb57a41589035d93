"""Compiled products of few rows."""

from __future__ import annotations

from numba.types import Array, Tuple, float32, int64

from xformer.ops._numba.compile import in_array, inline, kernel, out_array, parallel_body
from xformer.ops._numba.microkernel import (
    COLUMNS,
    DEPTH,
    GROUP,
    LANES,
    ROWS,
    STEP,
    add_row,
    add_rows,
    aligned,
    dot_row,
    dot_rows,
    microkernel,
    microkernel_prefetch,
    pack,
    padded,
)
from xformer.ops._numba.thread_pool import (
    POOL_STATE,
    argument_loader,
    job_state,
    next_part,
    parallel_kernel,
    run_job,
)
from xformer.ops._numba.vector_math import ZERO

# In a product of few rows, rows of b are read in groups of at most _MAX_GROUP that lie in few pages, so that they and
# the prefetched ones fit in the cache and in the TLB.
_MAX_GROUP, _PAGES, _PAGE = 128, 32, 1024
_IN_MATRIX, _OUT_MATRIX = Array(float32, 2, "A", readonly=True), Array(float32, 2, "A")
_TYPES = _IN_MATRIX, _IN_MATRIX, in_array(1), _OUT_MATRIX, int64, int64
multiply, _load_args = parallel_kernel(*_TYPES)  # out = a b + bias, in parts of (row_step, column_step)


@inline
def _bounds(part, row_step, column_step, out):
    """Return the first row, end row, first column and end column of a part of the result."""
    parts_per_row = -(-out.shape[1] // column_step)
    i, j = part // parts_per_row * row_step, part % parts_per_row * column_step
    return i, min(i + row_step, out.shape[0]), j, min(j + column_step, out.shape[1])


@inline
def _copy_bias(bias, padded_bias):
    """Copy the elements of a bias, if any, to memory with space for whole vectors."""
    for j in range(bias.size):
        padded_bias[j] = bias[j]


@parallel_body
def multiply_few_rows_parts(job):
    """Compute parts of a product of few rows with a matrix whose rows are contiguous; a part has some columns."""
    state = job_state(job)
    a, b, bias, out, row_step, column_step = _load_args(state)
    rows = -(-a.shape[0] // ROWS) * ROWS
    block, sums, panel = aligned(rows * STEP), aligned(rows * padded(column_step)), aligned(_MAX_GROUP * LANES)
    padded_bias = aligned(padded(column_step) if bias.size > 0 else 0)
    block[:] = ZERO
    part = next_part(state)
    while part >= 0:
        _, _, j, j_end = _bounds(part, row_step, column_step, out)
        _copy_bias(bias[j:j_end], padded_bias)
        _multiply_few_rows(a, b[:, j:j_end], padded_bias, out[:, j:j_end], block, sums, panel)
        part = next_part(state)


@inline
def _multiply_few_rows(a, b, bias, out, block, sums, panel):
    """Compute out = a b + bias for few rows, where reading b takes the time, so b is not packed.

    The rows of b and of out are contiguous; in a, rows or columns are.
    """
    rows, columns, step_b = -(-a.shape[0] // ROWS) * ROWS, b.shape[1], b.strides[0] // 4
    vector_columns, step = columns // LANES * LANES, padded(columns)
    group = min(_MAX_GROUP, max(_PAGES, _PAGES * _PAGE // max(1, step_b)))
    for first in range(0, b.shape[0], DEPTH):
        last = min(first + DEPTH, b.shape[0])
        pack(a, 0, first, a.shape[0], last - first, block, 0, STEP)
        for k in range(first, last, group):
            depth, has_bias = min(group, last - k), k == 0 and bias.size > 0
            for n in range(0, vector_columns, COLUMNS):
                vectors = min(COLUMNS, vector_columns - n) // LANES
                right, tile_bias = (b, k * step_b + n, step_b), (bias, n if has_bias else -1)
                offset_next = k * step_b + n + COLUMNS if n + COLUMNS < vector_columns else (k + depth) * step_b
                for i in range(0, rows, ROWS):
                    left, result = (block, i * STEP + k - first), (sums, i * step + n, step)
                    if vectors * LANES == COLUMNS and i + ROWS == rows:
                        microkernel_prefetch(left, right, result, depth, k > 0, tile_bias, offset_next)
                    else:
                        microkernel(vectors, left, right, result, depth, k > 0, tile_bias)
            if vector_columns < columns:
                pack(b, k, vector_columns, depth, columns - vector_columns, panel, 0, LANES)
                for i in range(0, rows, ROWS):
                    left, result = (block, i * STEP + k - first), (sums, i * step + vector_columns, step)
                    tile_bias = bias, vector_columns if has_bias else -1
                    microkernel(1, left, (panel, 0, LANES), result, depth, k > 0, tile_bias)
    for i in range(a.shape[0]):
        for j in range(columns):
            out[i, j] = sums[i * step + j]


_ROWS_TYPES = Tuple((in_array(1), _IN_MATRIX, in_array(1), out_array(2), out_array(2), int64, int64))
_load_rows_args = argument_loader(_ROWS_TYPES)


@kernel(POOL_STATE, int64, int64, int64, _ROWS_TYPES)
def multiply_rows(pool, num_helpers, num_parts, body, arguments):
    """Compute out = a b + bias for a flat a of one or a few rows, in parts of (row_step, column_step) of b.

    sums has the rows of out for each part of the depth. They are added in order, so the bits do not depend on the
    threads.
    """
    _, _, bias, out, sums, _, _ = arguments
    run_job(pool, num_helpers, num_parts, body, arguments)
    rows = out.shape[0]
    for i in range(rows):
        for j in range(out.shape[1]):
            total = sums[i, j]
            for part in range(i + rows, sums.shape[0], rows):
                total += sums[part, j]
            out[i, j] = total + bias[j] if bias.size > 0 else total


@parallel_body
def multiply_row_parts(job):
    """Multiply parts of a row by parts of a matrix whose rows are contiguous."""
    state = job_state(job)
    a, b, _, _, sums, row_step, column_step = _load_rows_args(state)
    step = b.strides[0] // 4
    part = next_part(state)
    while part >= 0:
        k, k_end, j, j_end = _bounds(part, row_step, column_step, b)
        row, vectors = sums[k // row_step], (j_end - j) // LANES
        row[j:j_end] = ZERO
        groups_end = k_end - (k_end - k) % GROUP
        for m in range(k, groups_end, GROUP):
            add_rows(a, m, b, m * step + j, step, row, j, vectors)
        for m in range(groups_end, k_end):
            add_row(a, m, b, m * step + j, step, row, j, vectors)
        for m in range(k, k_end):
            for n in range(j + vectors * LANES, j_end):
                row[n] += a[m] * b[m, n]
        part = next_part(state)


@parallel_body
def multiply_rows_transposed_parts(job):
    """Multiply rows by parts of a matrix whose columns are contiguous, a few of which are read at a time."""
    state = job_state(job)
    a, b, _, out, sums, row_step, column_step = _load_rows_args(state)
    step, depth, rows = b.strides[1] // 4, b.shape[0], out.shape[0]
    vectors = depth // LANES
    part = next_part(state)
    while part >= 0:
        _, _, j, j_end = _bounds(part, row_step, column_step, b)
        groups_end = j_end - (j_end - j) % GROUP
        for n in range(j, groups_end, GROUP):
            for i in range(rows):
                dot_rows(a, i * depth, b, n * step, step, sums[i], n, vectors)
        for n in range(groups_end, j_end):
            for i in range(rows):
                dot_row(a, i * depth, b, n * step, step, sums[i], n, vectors)
        for i in range(rows):
            for n in range(j, j_end):
                for k in range(vectors * LANES, depth):
                    sums[i, n] += a[i * depth + k] * b[k, n]
        part = next_part(state)
