"""Cross-entropy of token ids under logits, with label smoothing (Szegedy et al., 2016, section 7)."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.errors import ShapeError
from xformer.namespace import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import Operation


def _forward(
    logits: Array, labels: Array, *, pad_id: int, label_smoothing: float, save: bool
) -> tuple[Array, Any]:
    xp = array_namespace(logits)
    wide = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
    shifted = wide - xp.max(wide, axis=-1, keepdims=True)
    log_total = xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True, dtype=wide.dtype))
    log_probabilities = shifted - log_total
    picked = xp.take_along_axis(log_probabilities, xp.expand_dims(labels, axis=-1), axis=-1)[..., 0]
    losses = -(1.0 - label_smoothing) * picked
    if label_smoothing:
        losses = losses - label_smoothing * xp.mean(log_probabilities, axis=-1)
    counted = labels != pad_id
    return xp.where(counted, losses, xp.zeros_like(losses)), (log_probabilities, labels, counted)


def _vjp(g: Array, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float) -> tuple[Any, ...]:
    """dlogits = g (p - q), q being the smoothed one-hot distribution."""
    log_probabilities, labels, counted = residuals
    xp = array_namespace(g, log_probabilities)
    classes = log_probabilities.shape[-1]
    every = xp.arange(classes, dtype=labels.dtype, device=labels.device)
    hit = xp.expand_dims(labels, axis=-1) == every
    low = label_smoothing / classes
    dtype = log_probabilities.dtype
    target = xp.where(
        hit,
        xp.asarray(1.0 - label_smoothing + low, dtype=dtype, device=labels.device),
        xp.asarray(low, dtype=dtype, device=labels.device),
    )
    g = xp.where(counted, g, xp.zeros_like(g))
    return (xp.exp(log_probabilities) - target) * xp.expand_dims(g, axis=-1), None


_operation = Operation(Implementation("cross_entropy", _forward, _vjp))


def cross_entropy(logits: Array, labels: Array, *, pad_id: int = 0, label_smoothing: float = 0.0) -> Array:
    """The loss of each token, in nats; zero where the label is `pad_id`.

    logits: (..., vocabulary); labels: integers (...), in [0, vocabulary). With smoothing s the target distribution
    puts 1 - s on the label and spreads s evenly over the whole vocabulary. Returns (...), float32 or wider.

    Raises ShapeError when labels and logits do not fit.
    """
    if tuple(labels.shape) != tuple(logits.shape[:-1]):
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)}; expected {tuple(logits.shape[:-1])}, "
            f"the shape of the logits {tuple(logits.shape)} without the vocabulary"
        )
    return _operation(logits, labels, pad_id=pad_id, label_smoothing=label_smoothing)
