"""Masked softmax over the last axis, and the loss of its logarithm."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace, device, extra, is_integer, to_library_of
from xformer.config import check_number
from xformer.errors import ConfigError, DataError, ShapeError
from xformer.ops.operation import Operation


def _forward(x: Array, mask: Array | None, *, save: bool) -> tuple[Array, Any]:
    if x.shape[-1] == 0:  # no keys to attend to; most libraries raise for the maximum of an empty array
        return x, x
    xp = array_namespace(x)
    wide = xp.astype(x, accumulation_dtype(xp, x.dtype), copy=False)
    if mask is not None:
        wide = xp.where(mask, wide, -math.inf)
    top = xp.max(wide, axis=-1, keepdims=True)
    # In a fully masked row the maximum is -inf, and -inf - (-inf) would be NaN; subtract zero instead.
    powers = xp.exp(wide - xp.where(top == -math.inf, 0.0, top))
    total = xp.sum(powers, axis=-1, keepdims=True, dtype=powers.dtype)
    y = xp.astype(powers / xp.where(total == 0.0, 1.0, total), x.dtype, copy=False)
    return y, y


def _vjp(g: Array, y: Any, needs: Any) -> tuple[Any, ...]:
    return softmax_cotangent(g, y), None


def softmax_cotangent(g: Array, y: Array) -> Array:
    """Return the cotangent of the scores, y (g - sum(g y)), for probabilities y and their cotangent g."""
    xp = array_namespace(g, y)
    weighted = g * y
    total = xp.sum(weighted, axis=-1, keepdims=True, dtype=accumulation_dtype(xp, weighted.dtype))
    return weighted - y * xp.astype(total, weighted.dtype, copy=False)


_operation = Operation(
    "softmax", "x: (..., classes) float, mask?: ~(..., classes) bool -> (..., classes)", _forward, _vjp
)


def softmax(x: Array, mask: Array | None = None, *, temperature: float = 1.0) -> Array:
    """Compute exp(x / temperature) / sum(exp(x / temperature)) over the last axis.

    float16 and bfloat16 are summed in float32.

    Args:
        x: Scores of shape (..., classes), floating.
        mask: Boolean, broadcastable to x; where it is False, the probability is zero. A fully masked row gives zeros.
        temperature: Divides the scores; above 1 flattens the distribution, below 1 sharpens it.

    Returns:
        Probabilities of the shape and dtype of x.

    Raises:
        ShapeError: If shapes or dtypes do not match.
        ConfigError: If the temperature is not positive.
    """
    if not temperature > 0.0:
        raise ConfigError(f"temperature is {temperature}; expected more than 0")
    if temperature != 1.0:
        _operation.check(x, mask)
        x = extra.cast_like(x / temperature, x)
    return _operation(x, mask)


# --- Cross-entropy with label smoothing and z-loss --------------------------------------------------------------------
#
# Label smoothing: Szegedy et al. (2016), section 7; z-loss: Chowdhery et al. (2022), section 5.


def _cross_entropy_forward(
    logits: Array, labels: Array, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Array, Any]:
    xp = array_namespace(logits)
    wide = xp.astype(logits, accumulation_dtype(xp, logits.dtype), copy=False)
    top = xp.max(wide, axis=-1, keepdims=True)
    shifted = wide - top
    log_total = xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True, dtype=wide.dtype))
    log_probs = shifted - log_total
    is_token = labels != pad_id
    label_log_probs = xp.take_along_axis(log_probs, xp.expand_dims(labels, axis=-1), axis=-1)[..., 0]
    losses = -(1.0 - label_smoothing) * label_log_probs
    if label_smoothing:
        losses = losses - label_smoothing * xp.mean(log_probs, axis=-1)
    log_z = (log_total + top)[..., 0]
    if z_loss:
        losses = losses + z_loss * (log_z * log_z)
    return xp.where(is_token, losses, xp.zeros_like(losses)), (log_probs, log_z, labels, is_token)


def _cross_entropy_vjp(
    g: Array, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    """Compute dlogits = g (p - q + 2 z log(Z) p), with q the smoothed target distribution, Z the partition function."""
    log_probs, log_z, labels, is_token = residuals
    xp = array_namespace(g, log_probs)
    classes = log_probs.shape[-1]
    options = {"dtype": log_probs.dtype, "device": device(labels)}
    class_ids = xp.arange(classes, dtype=labels.dtype, device=device(labels))
    one_hot = xp.expand_dims(labels, axis=-1) == class_ids
    low = label_smoothing / classes
    high = 1.0 - label_smoothing + low
    target = xp.where(one_hot, xp.full((), high, **options), xp.full((), low, **options))
    g = xp.where(is_token, g, xp.zeros_like(g))
    probabilities = xp.exp(log_probs)
    if z_loss:
        probabilities = probabilities * (1.0 + 2.0 * z_loss * xp.expand_dims(log_z, axis=-1))
    return (probabilities - target) * xp.expand_dims(g, axis=-1), None


_cross_entropy = Operation(
    "cross_entropy",
    "logits: (..., classes) float, labels: (...) int[0, classes) -> (...)",
    _cross_entropy_forward,
    _cross_entropy_vjp,
    conditions={"at least one class": lambda sizes: sizes["classes"] > 0},
)


_NO_LABEL = -(2**31)  # the pad_id of kernels for labels without padding


def cross_entropy(
    logits: Array, labels: Array, *, pad_id: int | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Array:
    """Compute the loss of each token, in nats.

    The loss is -sum(q log(p)) + z_loss log(Z)^2, with p the softmax of the logits and Z its denominator. The target
    distribution q is 1 - label_smoothing for the label plus label_smoothing spread evenly over the vocabulary.

    Args:
        logits: Array of shape (..., vocabulary).
        labels: Integers of shape (...), in [0, vocabulary) or `pad_id`; NumPy arrays and lists are moved to the logits.
        pad_id: Label of padding, whose loss and gradients are zero; may be outside the vocabulary, such as -100. None
            if no label is padding.
        label_smoothing: Number in [0, 1).
        z_loss: Weight of log(Z)^2, which prevents a drift of the logits; PaLM uses 1e-4.

    Returns:
        Losses of shape (...), float32 or float64.

    Raises:
        ShapeError: If the labels do not have the shape of the logits without the vocabulary, or are not integers.
        DataError: If a label is out of range; checked where reading values is cheap.
        ConfigError: If label_smoothing or z_loss is out of range.
    """
    check_number("label_smoothing", label_smoothing, at_least=0, below=1)
    check_number("z_loss", z_loss, at_least=0)
    settings = {"pad_id": _NO_LABEL if pad_id is None else pad_id, "label_smoothing": label_smoothing, "z_loss": z_loss}
    is_token = None
    labels = to_library_of(labels, logits, "labels are")
    xp = array_namespace(logits, labels)
    if labels.shape == logits.shape:
        received = f"labels have the shape of the logits, {tuple(labels.shape)}"
        raise ShapeError(f"{received}; expected class indices, e.g. xp.argmax(labels, axis=-1) of one-hot labels")
    if is_integer(getattr(labels, "dtype", None)):
        labels = xp.astype(labels, xp.index_dtype, copy=False)  # uint8 cannot hold the ids of a large vocabulary
        if pad_id is not None and not 0 <= pad_id < logits.shape[-1]:  # no token, such as -100, so it has no logit
            is_token = labels != pad_id
            labels = xp.where(is_token, labels, xp.zeros_like(labels))
    try:
        losses = _cross_entropy(logits, labels, **settings)
    except DataError as error:
        raise DataError(f"{error}, or pad_id, which is {pad_id}") from None
    return losses if is_token is None else xp.where(is_token, losses, xp.zeros_like(losses))
