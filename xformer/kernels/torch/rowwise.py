"""Norms, embedding and cross-entropy."""

from __future__ import annotations

from typing import Any

import torch

from xformer.kernels.registry import Kernel, register
from xformer.kernels.torch.arrays import supports_floats, supports_wide_floats
from xformer.ops.linear import as_rows

# --- layer_norm ------------------------------------------------------------------------------------------------------


def _layer_norm_forward(x: Any, weight: Any, bias: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    if not save:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, epsilon), None
    y, mean, inverse = torch.native_layer_norm(x, weight.shape, weight, bias, epsilon)
    return y, (x, mean, inverse, weight, bias)


def _layer_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    x, mean, inverse, weight, bias = residuals
    return torch.ops.aten.native_layer_norm_backward(g, x, weight.shape, mean, inverse, weight, bias, needs)


# The portable definition scales rows of float16 and bfloat16, so that their squares do not overflow.
register(Kernel("torch.layer_norm", "layer_norm", "torch", supports_wide_floats, _layer_norm_forward, _layer_norm_vjp))

# --- rms_norm --------------------------------------------------------------------------------------------------------


def _rms_norm_forward(x: Any, weight: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, epsilon), None


def _rms_norm_supports_vjp(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    return "torch has its derivative for some devices only"


register(
    Kernel(
        "torch.rms_norm",
        "rms_norm",
        "torch",
        supports_wide_floats,
        _rms_norm_forward,
        None,
        supports_vjp=_rms_norm_supports_vjp,
    )
)

# --- embedding -------------------------------------------------------------------------------------------------------


def _embedding_forward(weight: Any, ids: Any, *, scale: float, save: bool) -> tuple[Any, Any]:
    y = torch.nn.functional.embedding(ids, weight)
    return (y if scale == 1.0 else y * scale), (ids, len(weight))


def _embedding_vjp(g: Any, residuals: Any, needs: Any, *, scale: float) -> tuple[Any, ...]:
    ids, vocabulary = residuals
    g = g if scale == 1.0 else g * scale
    return torch.ops.aten.embedding_dense_backward(g, ids, vocabulary, -1, False), None


def _embedding_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    if arrays[1].dtype not in (torch.int32, torch.int64):
        return f"ids of dtype {arrays[1].dtype}"
    return supports_wide_floats(arrays, static)


register(Kernel("torch.embedding", "embedding", "torch", _embedding_supports, _embedding_forward, _embedding_vjp))

# --- cross_entropy ---------------------------------------------------------------------------------------------------


def _cross_entropy_forward(
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


def _cross_entropy_vjp(
    g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    """Compute dlogits = g (p - q + 2 z log(Z) p), with q the smoothed target distribution, Z the partition function."""
    log_probs, log_z, labels, is_token, shape = residuals
    g = g.reshape(-1).masked_fill(~is_token, 0.0)[:, None]
    dlogits = log_probs.exp() * (g if log_z is None else g * (1.0 + 2.0 * z_loss * log_z[:, None]))
    if label_smoothing:
        dlogits -= g * (label_smoothing / shape[-1])
    return dlogits.scatter_add_(1, labels[:, None], g * (label_smoothing - 1.0)).view(shape), None


register(
    Kernel("torch.cross_entropy", "cross_entropy", "torch", supports_floats, _cross_entropy_forward, _cross_entropy_vjp)
)
