"""Softmax on CuPy: the row is read once if it fits into the registers of a block."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import array_namespace
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import FLOATS, contiguous, dtype_names, empty, row_count, why_not
from xformer.kernels.cupy.grid import grid_for_shared_rows, vectors_per_thread
from xformer.ops.operation import Kernel

_VECTORS = 2  # loads per thread of rows that a warp cannot load at once; as many numbers fit into registers


def _strided(mask: Any, shape: tuple[int, ...]) -> tuple[Any, int, int, tuple[int, ...]]:
    """View a mask broadcast to `shape` with the axes (outer, middle, inner, last).

    The mask is copied only if more axes have strides of their own.

    Returns:
        The mask, the sizes `middle` and `inner`, and the strides of all four axes.
    """
    xp = array_namespace(mask)
    mask = xp.broadcast_to(mask, shape)
    axes: list[tuple[int, int]] = []  # sizes and strides of all axes but the last
    for size, stride in zip(shape[:-1], mask.strides[:-1], strict=True):
        if axes and axes[-1][1] == stride * size:
            axes[-1] = axes[-1][0] * size, stride  # merge the two axes
        elif size != 1:
            axes.append((size, stride))
    if len(axes) > 3:
        return _strided(xp.reshape(contiguous(mask), (-1, shape[-1])), (math.prod(shape[:-1]), shape[-1]))
    outer, middle, inner = [(1, 0)] * (3 - len(axes)) + axes
    return mask, middle[0], inner[0], (outer[1], middle[1], inner[1], mask.strides[-1])


def _forward(x: Any, mask: Any, *, save: bool) -> tuple[Any, Any]:
    x, rows = contiguous(x), row_count(x)
    y = empty(x)
    if x.size:
        mask, middle, inner, strides = (None, 1, 1, (0, 0, 0, 0)) if mask is None else _strided(mask, x.shape)
        sizes, vectors = (rows, x.shape[-1], middle, inner), vectors_per_thread(x, _VECTORS)
        *grid, threads = grid_for_shared_rows(rows, x, vectors)
        template = *dtype_names(x), str(vectors)
        cuda_launch.launch("softmax.softmax", template, *grid, x, mask, y, *sizes, *strides, threads)
    return y, y


def _vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    g, rows = contiguous(g, y.dtype), row_count(y)
    dx = empty(y)
    *grid, threads = grid_for_shared_rows(rows, y, _VECTORS)
    cuda_launch.launch("softmax.softmax_vjp", dtype_names(y), *grid, g, y, dx, rows, y.shape[-1], threads)
    return dx, None


KERNELS = [Kernel("cupy.softmax", "softmax", "cupy", _forward, _vjp, dtypes=FLOATS, why_not=why_not)]
