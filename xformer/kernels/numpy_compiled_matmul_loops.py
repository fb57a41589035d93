"""The loop of compiled matrix products; see numpy_compiled_loops for how and when it is compiled."""

from __future__ import annotations

import numpy as np
from numba.types import Array, float32

from xformer.kernels.numpy_compiled_loops import loop
from xformer.kernels.numpy_compiled_tiles import COLUMNS, DEPTH, LANES, ROWS, STEP, aligned, multiply_tile, pack

_BLOCK = 384  # rows that are packed at a time, into a part of a second-level cache
_ANYHOW = Array(float32, 2, "A", readonly=True)


@loop(_ANYHOW, _ANYHOW, Array(float32, 2, "A"))
def multiply(a, b, out):
    """out = a b. Of each of a and b, rows or columns are contiguous; of out, the rows."""
    block = aligned((min(_BLOCK, a.shape[0]) + ROWS) * STEP)
    panel, edge = aligned(DEPTH * COLUMNS), aligned(ROWS * COLUMNS)
    step = out.strides[0] // 4
    for k in range(0, a.shape[1], DEPTH):
        depth, more = min(DEPTH, a.shape[1] - k), k > 0
        for m in range(0, a.shape[0], _BLOCK):
            high = min(_BLOCK, a.shape[0] - m)
            pack(a, m, k, high, depth, block, 0, STEP)
            for n in range(0, b.shape[1], COLUMNS):
                wide = min(COLUMNS, b.shape[1] - n)
                vectors = -(-wide // LANES)
                pack(b, k, n, depth, wide, panel, 0, vectors * LANES)
                for i in range(0, high, ROWS):
                    if i + ROWS <= high and wide == vectors * LANES:
                        multiply_tile(vectors, block, i * STEP, panel, 0, depth, out, (m + i) * step + n, step, more)
                        continue
                    multiply_tile(vectors, block, i * STEP, panel, 0, depth, edge, 0, COLUMNS, False)
                    for row in range(min(ROWS, high - i)):
                        for j in range(wide):
                            before = out[m + i + row, n + j] if more else np.float32(0.0)
                            out[m + i + row, n + j] = before + edge[row * COLUMNS + j]
