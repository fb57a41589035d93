"""Cross-entropy of token ids under logits, with label smoothing (Szegedy et al., 2016, section 7) and z-loss
(Chowdhery et al., 2022, section 5)."""

from __future__ import annotations

import math
from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import (
    Array,
    accumulation_dtype,
    array_namespace,
    device,
    dtype_name,
    index_dtype,
    is_host_accessible,
    is_integer,
)
from xformer.errors import ConfigError, DataError, ShapeError
from xformer.ops.operation import Operation


def _forward(
    logits: Array, labels: Array, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Array, Any]:
    xp = array_namespace(logits)
    wide = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
    top = xp.max(wide, axis=-1, keepdims=True)
    shifted = wide - top
    log_total = xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True, dtype=wide.dtype))
    log_probabilities = shifted - log_total
    counted = labels != pad_id
    picked = xp.take_along_axis(log_probabilities, xp.expand_dims(labels, axis=-1), axis=-1)[..., 0]
    losses = -(1.0 - label_smoothing) * picked
    if label_smoothing:
        losses = losses - label_smoothing * xp.mean(log_probabilities, axis=-1)
    log_partition = (log_total + top)[..., 0]
    if z_loss:
        losses = losses + z_loss * (log_partition * log_partition)
    return xp.where(counted, losses, xp.zeros_like(losses)), (log_probabilities, log_partition, labels, counted)


def _vjp(
    g: Array, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    """dlogits = g (p - q + 2 z log(Z) p), q being the smoothed one-hot distribution, Z the partition function."""
    log_probabilities, log_partition, labels, counted = residuals
    xp = array_namespace(g, log_probabilities)
    classes = log_probabilities.shape[-1]
    place = device(labels)
    every = xp.arange(classes, dtype=labels.dtype, device=place)
    hit = xp.expand_dims(labels, axis=-1) == every
    low = label_smoothing / classes
    dtype = log_probabilities.dtype
    target = xp.where(
        hit,
        xp.asarray(1.0 - label_smoothing + low, dtype=dtype, device=place),
        xp.asarray(low, dtype=dtype, device=place),
    )
    g = xp.where(counted, g, xp.zeros_like(g))
    probabilities = xp.exp(log_probabilities)
    if z_loss:
        probabilities = probabilities * (1.0 + 2.0 * z_loss * xp.expand_dims(log_partition, axis=-1))
    return (probabilities - target) * xp.expand_dims(g, axis=-1), None


_operation = Operation(Implementation("cross_entropy", _forward, _vjp))


def cross_entropy(
    logits: Array, labels: Array, *, pad_id: int = 0, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Array:
    """The loss of each token, in nats; zero where the label is `pad_id`.

    logits: (..., vocabulary); labels: integers (...), in [0, vocabulary) or pad_id. With smoothing s the target
    distribution puts 1 - s on the label and spreads s evenly over the whole vocabulary. z_loss times the squared
    logarithm of the softmax's denominator is added, which keeps the logits from drifting away (PaLM has 1e-4).
    Returns (...), float32 or wider.

    Raises ShapeError when labels and logits do not fit, DataError for labels out of range, where reading them costs
    no wait, ConfigError for a smoothing outside [0, 1) or a negative z_loss.
    """
    array_namespace(logits, labels)
    if tuple(labels.shape) != tuple(logits.shape[:-1]):
        raise ShapeError(
            f"labels have shape {tuple(labels.shape)}; expected {tuple(logits.shape[:-1])}, "
            f"the shape of the logits {tuple(logits.shape)} without the vocabulary"
        )
    if not is_integer(labels.dtype):
        raise ShapeError(f"labels have dtype {dtype_name(labels.dtype)}; expected integers")
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(f"label_smoothing is {label_smoothing}; expected a number in [0, 1)")
    if not 0.0 <= z_loss < math.inf:
        raise ConfigError(f"z_loss is {z_loss}; expected a number of at least 0")
    settings = {"pad_id": pad_id, "label_smoothing": label_smoothing, "z_loss": z_loss}
    xp = array_namespace(labels)
    labels = xp.astype(labels, index_dtype(xp), copy=False)  # narrow integers cannot count a large vocabulary
    if 0 <= pad_id < logits.shape[-1]:
        _check_range(labels, logits.shape[-1], pad_id)
        return _operation(logits, labels, **settings)
    # A mark that no token has, such as -100: there is no logit to pick for it.
    counted = labels != pad_id
    labels = xp.where(counted, labels, xp.zeros_like(labels))
    _check_range(labels, logits.shape[-1], pad_id)
    losses = _operation(logits, labels, **settings)
    xp = array_namespace(losses)
    return xp.where(counted, losses, xp.zeros_like(losses))


def _check_range(labels: Array, classes: int, pad_id: int) -> None:
    if not is_host_accessible(labels) or 0 in labels.shape:
        return
    xp = array_namespace(labels)
    lowest, highest = int(xp.min(labels)), int(xp.max(labels))
    if lowest < 0 or highest >= classes:
        raise DataError(
            f"labels range from {lowest} to {highest}; expected 0 to {classes - 1} for {classes} logits, "
            f"or pad_id {pad_id}"
        )
