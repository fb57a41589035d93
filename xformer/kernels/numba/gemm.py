"""The loops of compiled matrix products; see loops for how and when they are compiled."""

from __future__ import annotations

from numba.types import Array, float32, int64

from xformer.kernels.numba.loops import ZERO, given, loop, worker
from xformer.kernels.numba.microkernel import (
    COLUMNS,
    DEPTH,
    LANES,
    ROWS,
    STEP,
    aligned,
    multiply_tile,
    multiply_tile_fetching,
    pack,
    padded,
    piece,
)
from xformer.kernels.numba.thread_pool_loops import SHARED, arguments, next_part, share, words_of

_BLOCK = 384  # rows that are packed at a time, into a part of a second-level cache
# Rows that are read side by side, at most, and so many that they lie in few pages: there and in the cache is room for
# them and for those that are fetched.
_ABREAST, _PAGES, _PAGE = 128, 32, 1024
_ANYHOW, _MADE = Array(float32, 2, "A", readonly=True), Array(float32, 2, "A")
_ARGUMENTS = _ANYHOW, _ANYHOW, given(1), _MADE, int64, int64
_arguments = arguments(*_ARGUMENTS)


@piece
def _cut(part, step, columns_step, out):
    """The rows and columns of the result that are a part's: the first and the end of each."""
    across = -(-out.shape[1] // columns_step)
    i, j = part // across * step, part % across * columns_step
    return i, min(i + step, out.shape[0]), j, min(j + columns_step, out.shape[1])


@piece
def _padded(bias, start):
    """Copy what there is of a bias to memory that has room for whole vectors."""
    for j in range(bias.size):
        start[j] = bias[j]


@piece
def _multiply(a, b, start, out, block, panel, edge):
    """out = a b + start, if that has elements. Of each of a and b, rows or columns are contiguous; of out, the rows."""
    step = out.strides[0] // 4
    for m in range(0, a.shape[0], _BLOCK):
        high = min(_BLOCK, a.shape[0] - m)
        for k in range(0, a.shape[1], DEPTH):
            depth, more, begun = min(DEPTH, a.shape[1] - k), k > 0, k > 0 or start.size == 0
            pack(a, m, k, high, depth, block, 0, STEP)
            for n in range(0, b.shape[1], COLUMNS):
                wide = min(COLUMNS, b.shape[1] - n)
                vectors = -(-wide // LANES)
                of_panel = vectors * LANES
                pack(b, k, n, depth, wide, panel, 0, of_panel)
                right, begin = (panel, 0, of_panel), (start, -1 if begun else n)
                for i in range(0, high, ROWS):
                    left = block, i * STEP
                    if i + ROWS <= high and wide == of_panel:
                        multiply_tile(vectors, left, right, (out, (m + i) * step + n, step), depth, more, begin)
                        continue
                    multiply_tile(vectors, left, right, (edge, 0, COLUMNS), depth, False, begin)
                    for row in range(min(ROWS, high - i)):
                        for j in range(wide):
                            before = out[m + i + row, n + j] if more else ZERO
                            out[m + i + row, n + j] = before + edge[row * COLUMNS + j]


@worker
def multiply_parts(job):
    """LayerFactory of a product, of whatever size."""
    words = words_of(job)
    a, b, bias, out, step, columns_step = _arguments(words)
    block = aligned((min(_BLOCK, step) + ROWS) * STEP)
    panel, edge = aligned(DEPTH * COLUMNS), aligned(ROWS * COLUMNS)
    start = aligned(padded(columns_step) if bias.size > 0 else 0)
    part = next_part(words)
    while part >= 0:
        i, i_end, j, j_end = _cut(part, step, columns_step, out)
        _padded(bias[j:j_end], start)
        _multiply(a[i:i_end], b[:, j:j_end], start, out[i:i_end, j:j_end], block, panel, edge)
        part = next_part(words)


@worker
def multiply_few_parts(job):
    """LayerFactory of a product of few rows with a matrix whose rows are contiguous: some columns each."""
    words = words_of(job)
    a, b, bias, out, step, columns_step = _arguments(words)
    rows = -(-a.shape[0] // ROWS) * ROWS
    block, sums, panel = aligned(rows * STEP), aligned(rows * padded(columns_step)), aligned(_ABREAST * LANES)
    start = aligned(padded(columns_step) if bias.size > 0 else 0)
    block[:] = ZERO
    part = next_part(words)
    while part >= 0:
        _, _, j, j_end = _cut(part, step, columns_step, out)
        _padded(bias[j:j_end], start)
        _multiply_few(a, b[:, j:j_end], start, out[:, j:j_end], block, sums, panel)
        part = next_part(words)


@piece
def _multiply_few(a, b, start, out, block, sums, panel):
    """out = a b + start for rows so few that reading b takes longest: it is read where it is.

    The rows of b and out are contiguous, and of a, rows or columns.
    """
    rows, columns, step_b = -(-a.shape[0] // ROWS) * ROWS, b.shape[1], b.strides[0] // 4
    whole, step = columns // LANES * LANES, padded(columns)
    abreast = min(_ABREAST, max(_PAGES, _PAGES * _PAGE // max(1, step_b)))
    for first in range(0, b.shape[0], DEPTH):
        last = min(first + DEPTH, b.shape[0])
        pack(a, 0, first, a.shape[0], last - first, block, 0, STEP)
        for k in range(first, last, abreast):
            depth, begun = min(abreast, last - k), k > 0 or start.size == 0
            for n in range(0, whole, COLUMNS):
                vectors = min(COLUMNS, whole - n) // LANES
                right, begin = (b, k * step_b + n, step_b), (start, -1 if begun else n)
                at_next = k * step_b + n + COLUMNS if n + COLUMNS < whole else (k + depth) * step_b
                for i in range(0, rows, ROWS):
                    left, result = (block, i * STEP + k - first), (sums, i * step + n, step)
                    if vectors * LANES == COLUMNS and i + ROWS == rows:
                        multiply_tile_fetching(left, right, result, depth, k > 0, begin, at_next)
                    else:
                        multiply_tile(vectors, left, right, result, depth, k > 0, begin)
            if whole < columns:
                pack(b, k, whole, depth, columns - whole, panel, 0, LANES)
                for i in range(0, rows, ROWS):
                    left, result = (block, i * STEP + k - first), (sums, i * step + whole, step)
                    begin = start, -1 if begun else whole
                    multiply_tile(1, left, (panel, 0, LANES), result, depth, k > 0, begin)
    for i in range(a.shape[0]):
        for j in range(columns):
            out[i, j] = sums[i * step + j]


@loop(*SHARED, *_ARGUMENTS)
def multiply(pool, helpers, parts, worker, a, b, bias, out, step, columns_step):
    """out = a b + bias, if there is one, in parts of so many rows and columns."""
    share(pool, helpers, parts, worker, (a, b, bias, out, step, columns_step))
