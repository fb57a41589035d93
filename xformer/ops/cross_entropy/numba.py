"""Cross-entropy on NumPy, compiled by numba."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba.types import float32, int64

from xformer.backends.recording import contiguous, empty
from xformer.ops._numba.compile import compiled_kernel, flatten, in_array, kernel, out_array
from xformer.ops._numba.vector_math import (
    MIN_SORTABLE_INT,
    ONE,
    ZERO,
    exp,
    float_to_sortable_int,
    sortable_int_to_float,
)
from xformer.ops.linear.definition import as_rows

_f32 = np.float32  # a Python number would turn a computation into float64


@kernel(in_array(2), in_array(1, int64), int64, float32, float32, out_array(1), out_array(2))
def cross_entropy_kernel(logits, labels, pad_id, smoothing, z_loss, losses, statistics):
    """Compute the loss of each row.

    statistics: (2, rows), the largest logit and the sum of exp(logit - largest).
    """
    classes = logits.shape[1]
    for i in range(logits.shape[0]):
        row, max_int, total, sum_logits = logits[i], MIN_SORTABLE_INT, ZERO, ZERO
        losses[i] = ZERO
        if labels[i] == pad_id:
            continue
        for j in range(classes):
            sum_logits += row[j]
            max_int = max(max_int, float_to_sortable_int(row[j]))
        largest = sortable_int_to_float(max_int)
        for j in range(classes):
            total += exp(row[j] - largest)
        statistics[0, i], statistics[1, i] = largest, total
        log_z = largest + math.log(total)
        loss = (ONE - smoothing) * (log_z - row[labels[i]])
        if z_loss > ZERO:  # the square of log_z may overflow
            loss += z_loss * log_z * log_z
        losses[i] = loss + smoothing * (log_z - sum_logits / _f32(classes)) if smoothing > ZERO else loss


@kernel(in_array(1), in_array(2), in_array(1, int64), in_array(2), int64, float32, float32, out_array(2))
def cross_entropy_vjp_kernel(g, logits, labels, statistics, pad_id, smoothing, z_loss, dlogits):
    """Compute dlogits = g (p - q + 2 z log(Z) p), with q the smoothed target distribution, Z the partition function."""
    classes = logits.shape[1]
    for i in range(logits.shape[0]):
        row, out, largest, total = logits[i], dlogits[i], statistics[0, i], statistics[1, i]
        if labels[i] == pad_id:
            for j in range(classes):
                out[j] = ZERO
            continue
        factor = g[i] * (ONE + _f32(2.0) * z_loss * (largest + math.log(total))) / total
        low = g[i] * smoothing / _f32(classes)
        for j in range(classes):
            out[j] = exp(row[j] - largest) * factor - low
        out[labels[i]] -= (ONE - smoothing) * g[i]


def _forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Save the logits: computing their exponentials again takes less time than storing them."""
    logit_rows, ids = contiguous(as_rows(logits)), flatten(labels, np.int64)
    losses, statistics = empty(labels.shape, logits.dtype), empty((2, len(logit_rows)), logits.dtype)
    cross_entropy_kernel(logit_rows, ids, pad_id, label_smoothing, z_loss, losses.reshape(-1), statistics)
    return losses, (logit_rows, ids, statistics, logits.shape)


def _vjp(g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float) -> tuple[Any, ...]:
    logit_rows, ids, statistics, shape = residuals
    dlogits = np.empty_like(logit_rows)
    cross_entropy_vjp_kernel(flatten(g), logit_rows, ids, statistics, pad_id, label_smoothing, z_loss, dlogits)
    return dlogits.reshape(shape), None


KERNELS = [
    compiled_kernel("cross_entropy", _forward, _vjp),
]
