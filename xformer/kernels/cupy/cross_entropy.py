"""Cross-entropy on CuPy: one pass computes the maximum of a row and its sum of exponentials."""

from __future__ import annotations

from typing import Any

from xformer.backends import array_namespace
from xformer.kernels.cupy import launch as cuda_launch
from xformer.kernels.cupy.arrays import FLOATS, compute_dtype, contiguous, dtype_names, empty, row_count, why_not
from xformer.kernels.cupy.grid import grid_for_rows
from xformer.ops.operation import Kernel

_VECTORS = 2  # that a thread loads at a time: R in cuda/softmax.cu


def _forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Save the logits, and two numbers per row."""
    logits, labels = contiguous(logits), contiguous(labels, array_namespace(labels).int64)
    rows, n = row_count(logits), logits.shape[-1]
    losses, tops, log_totals = (empty(logits, labels.shape, compute_dtype(logits)) for _ in range(3))
    arrays = logits, labels, losses, tops, log_totals
    settings = rows, n, pad_id, float(label_smoothing), float(z_loss)
    grid = grid_for_rows(rows, logits, _VECTORS)
    cuda_launch.launch("softmax.cross_entropy", dtype_names(logits), *grid, *arrays, *settings)
    return losses, (logits, labels, tops, log_totals)


def _vjp(g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float) -> tuple[Any, ...]:
    logits, labels, tops, log_totals = residuals
    g, rows, n = contiguous(g, tops.dtype), row_count(logits), logits.shape[-1]
    dlogits = empty(logits)
    arrays = g, logits, labels, tops, log_totals, dlogits
    settings = rows, n, pad_id, float(label_smoothing), float(z_loss)
    cuda_launch.launch(
        "softmax.cross_entropy_vjp", dtype_names(logits), *grid_for_rows(rows, logits), *arrays, *settings
    )
    return dlogits, None


KERNELS = [Kernel("cupy.cross_entropy", "cross_entropy", "cupy", _forward, _vjp, dtypes=FLOATS, why_not=why_not)]
