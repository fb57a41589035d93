"""Cross-entropy on torch."""

from __future__ import annotations

from typing import Any

import torch

from xformer.ops._torch import FLOATS
from xformer.ops.linear.definition import as_rows
from xformer.ops.operation import Kernel


def _forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    rows, labels_flat = as_rows(logits), labels.reshape(-1)
    is_token = labels_flat != pad_id
    log_probs = torch.log_softmax(rows, -1, dtype=torch.promote_types(rows.dtype, torch.float32))
    losses = log_probs.gather(-1, labels_flat[:, None])[:, 0] * (label_smoothing - 1.0)
    if label_smoothing:
        losses = losses - label_smoothing * log_probs.mean(-1)
    log_z = None
    if z_loss:
        log_z = torch.logsumexp(rows.to(log_probs.dtype), -1)
        losses = losses + z_loss * log_z * log_z
    losses = losses.masked_fill(~is_token, 0.0).view(labels.shape)  # not a product: a padded row may hold infinities
    return losses, (log_probs, log_z, labels_flat, is_token, logits.shape)


def _vjp(g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float) -> tuple[Any, ...]:
    """Compute dlogits = g (p - q + 2 z log(Z) p), with q the smoothed target distribution, Z the partition function."""
    log_probs, log_z, labels, is_token, shape = residuals
    g = g.reshape(-1).masked_fill(~is_token, 0.0)[:, None]
    dlogits = log_probs.exp() * (g if log_z is None else g * (1.0 + 2.0 * z_loss * log_z[:, None]))
    if label_smoothing:
        dlogits -= g * (label_smoothing / shape[-1])
    return dlogits.scatter_add_(1, labels[:, None], g * (label_smoothing - 1.0)).view(shape), None


KERNELS = [Kernel("torch.cross_entropy", "cross_entropy", "torch", _forward, _vjp, dtypes=FLOATS)]
