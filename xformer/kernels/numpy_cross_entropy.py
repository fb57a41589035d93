"""Cross-entropy on NumPy: a few rows of logits at a time, each read once and kept in the cache through all passes."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.kernels.numpy_support import floats, ones, rows_at_a_time
from xformer.kernels.registry import Kernel, register
from xformer.ops.linear import as_rows


def _forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Keep exp(x - max) for the derivative, one over its sum, and the logarithm of the whole sum; when nothing is kept,
    reuse one block for all."""
    rows, flat = as_rows(logits), labels.reshape(-1)
    counted = flat != pad_id
    classes, all_ones = rows.shape[1], ones(rows.shape[1], rows.dtype)
    losses, log_partition = np.empty(flat.shape, rows.dtype), np.empty(flat.shape, rows.dtype)
    inverse = np.empty((flat.size, 1), rows.dtype)
    powers = np.empty(rows.shape, rows.dtype) if save else None
    block = None
    for part in rows_at_a_time(rows, arrays=2):
        x = rows[part]
        top = x.max(axis=-1)
        if powers is not None:
            block = powers[part]
        elif block is None:
            block = np.empty(x.shape, x.dtype)
        e = np.subtract(x, top[:, None], out=block[: len(x)])
        np.exp(e, out=e)
        total = e @ all_ones
        np.divide(1.0, total, out=inverse[part, 0])
        log_total = np.add(np.log(total), top, out=log_partition[part])
        picked = np.take_along_axis(x, flat[part, None], axis=-1)[:, 0]
        loss = (1.0 - label_smoothing) * (log_total - picked)
        if label_smoothing:
            loss += label_smoothing * (log_total - (x @ all_ones) / classes)
        if z_loss:
            loss += z_loss * (log_total * log_total)
        losses[part] = loss
    losses[~counted] = 0.0  # not a product: a padded row may hold anything, infinities included
    return losses.reshape(labels.shape), (powers, inverse, log_partition, flat, counted, logits.shape)


def _vjp(g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float) -> tuple[Any, ...]:
    """dlogits = g (p - q + 2 z log(Z) p), q being the smoothed one-hot distribution, Z the partition function."""
    powers, inverse, log_partition, flat, counted, shape = residuals
    g = np.where(counted, g.reshape(-1), powers.dtype.type(0.0))
    inverse *= (g * (1.0 + 2.0 * z_loss * log_partition) if z_loss else g)[:, None]
    low = g[:, None] * (label_smoothing / shape[-1])
    for part in rows_at_a_time(powers, arrays=1):
        p = powers[part]
        p *= inverse[part]
        if label_smoothing:
            p -= low[part]
    powers[np.arange(flat.size), flat] -= (1.0 - label_smoothing) * g
    return powers.reshape(shape), None


register(Kernel("numpy.cross_entropy", "cross_entropy", "numpy", floats, _forward, _vjp))
