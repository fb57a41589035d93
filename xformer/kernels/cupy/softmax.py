"""Softmax and cross-entropy on CuPy: one pass computes the maximum of a row and its sum of exponentials."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import array_namespace, dtype_name
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import compute_dtype, contiguous, dtype_names, empty, row_count, supports_floats
from xformer.kernels.cupy.grid import grid_for_rows, grid_for_short_rows
from xformer.kernels.registry import Kernel, register

# --- softmax ---------------------------------------------------------------------------------------------------------


def _softmax_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, mask = arrays
    if mask is not None:
        if dtype_name(mask.dtype) != "bool":
            return f"a mask of dtype {dtype_name(mask.dtype)} (kernels take bool)"
        sizes = zip(mask.shape[::-1], x.shape[::-1], strict=False)
        if mask.ndim > x.ndim or any(size not in (1, x_size) for size, x_size in sizes):
            return "the mask is larger than the scores"
    return supports_floats(arrays, static)


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


def _softmax_forward(x: Any, mask: Any, *, save: bool) -> tuple[Any, Any]:
    x, rows = contiguous(x), row_count(x)
    y = empty(x)
    if x.size:
        mask, middle, inner, strides = (None, 1, 1, (0, 0, 0, 0)) if mask is None else _strided(mask, x.shape)
        sizes, (*grid, threads) = (rows, x.shape[-1], middle, inner), grid_for_short_rows(rows, x)
        cuda_launch.launch("softmax.softmax", dtype_names(x), *grid, x, mask, y, *sizes, *strides, threads)
    return y, y


def _softmax_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    g, rows = contiguous(g, y.dtype), row_count(y)
    dx = empty(y)
    *grid, threads = grid_for_short_rows(rows, y)
    cuda_launch.launch("softmax.softmax_vjp", dtype_names(y), *grid, g, y, dx, rows, y.shape[-1], threads)
    return dx, None


register(Kernel("cupy.softmax", "softmax", "cupy", _softmax_supports, _softmax_forward, _softmax_vjp))

# --- cross_entropy ---------------------------------------------------------------------------------------------------


def _cross_entropy_forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Save the logits, and two numbers per row."""
    logits, labels = contiguous(logits), contiguous(labels, array_namespace(labels).int64)
    rows, n = row_count(logits), logits.shape[-1]
    losses, tops, log_totals = (empty(logits, labels.shape, compute_dtype(logits)) for _ in range(3))
    arrays = logits, labels, losses, tops, log_totals
    settings = rows, n, pad_id, float(label_smoothing), float(z_loss)
    cuda_launch.launch("softmax.cross_entropy", dtype_names(logits), *grid_for_rows(rows, logits), *arrays, *settings)
    return losses, (logits, labels, tops, log_totals)


def _cross_entropy_vjp(
    g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    logits, labels, tops, log_totals = residuals
    g, rows, n = contiguous(g, tops.dtype), row_count(logits), logits.shape[-1]
    dlogits = empty(logits)
    arrays = g, logits, labels, tops, log_totals, dlogits
    settings = rows, n, pad_id, float(label_smoothing), float(z_loss)
    cuda_launch.launch(
        "softmax.cross_entropy_vjp", dtype_names(logits), *grid_for_rows(rows, logits), *arrays, *settings
    )
    return dlogits, None


register(
    Kernel("cupy.cross_entropy", "cross_entropy", "cupy", supports_floats, _cross_entropy_forward, _cross_entropy_vjp)
)
