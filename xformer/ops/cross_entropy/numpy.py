"""Cross-entropy on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.ops._numpy import FLOATS, ones, row_blocks
from xformer.ops.linear.definition import as_rows
from xformer.ops.operation import Kernel


def _forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Compute blocks of rows, whose logits are read once and stay in the cache.

    With `save`, exp(x - max), the inverse of its sum and log(Z) are residuals; otherwise all blocks use one buffer.
    """
    rows, labels_flat = as_rows(logits), labels.reshape(-1)
    is_token = labels_flat != pad_id
    classes, all_ones = rows.shape[1], ones(rows.shape[1], rows.dtype)
    losses, log_z = np.empty(labels_flat.shape, rows.dtype), np.empty(labels_flat.shape, rows.dtype)
    inverse = np.empty((labels_flat.size, 1), rows.dtype)
    powers = np.empty(rows.shape, rows.dtype) if save else None
    buffer = None
    for block in row_blocks(rows, num_arrays=2):
        x = rows[block]
        top = x.max(axis=-1)
        if powers is not None:
            buffer = powers[block]
        elif buffer is None:
            buffer = np.empty(x.shape, x.dtype)
        e = np.subtract(x, top[:, None], out=buffer[: len(x)])  # large logits would round log(Z) away
        label_logits = np.take_along_axis(e, labels_flat[block, None], axis=-1)[:, 0]
        mean = (e @ all_ones) / classes if label_smoothing else 0.0
        np.exp(e, out=e)
        total = e @ all_ones
        np.divide(1.0, total, out=inverse[block, 0])
        log_total = np.log(total)
        log_z_block = np.add(log_total, top, out=log_z[block])
        loss = (1.0 - label_smoothing) * (log_total - label_logits)
        if label_smoothing:
            loss += label_smoothing * (log_total - mean)
        if z_loss:
            loss += z_loss * (log_z_block * log_z_block)
        losses[block] = loss
    losses[~is_token] = 0.0  # not a product: a padded row may hold infinities
    return losses.reshape(labels.shape), (powers, inverse, log_z, labels_flat, is_token, logits.shape)


def _vjp(g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float) -> tuple[Any, ...]:
    """Compute dlogits = g (p - q + 2 z log(Z) p), with q the smoothed target distribution, Z the partition function."""
    powers, inverse, log_z, labels, is_token, shape = residuals
    g = np.where(is_token, g.reshape(-1), powers.dtype.type(0.0))
    inverse *= (g * (1.0 + 2.0 * z_loss * log_z) if z_loss else g)[:, None]
    low = g[:, None] * (label_smoothing / shape[-1])
    for block in row_blocks(powers, num_arrays=1):
        p = powers[block]
        p *= inverse[block]
        if label_smoothing:
            p -= low[block]
    powers[np.arange(labels.size), labels] -= (1.0 - label_smoothing) * g
    return powers.reshape(shape), None


KERNELS = [Kernel("numpy.cross_entropy", "cross_entropy", "numpy", _forward, _vjp, dtypes=FLOATS)]
