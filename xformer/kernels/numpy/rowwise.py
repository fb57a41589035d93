"""NumPy kernels: the same operations with buffers reused, passes merged and matrix products kept whole.

Each is tested equal to its portable definition. What a forward is given is never written; residuals that it made
belong to it, and a trace pulls each record back once, so derivatives may overwrite those.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.kernels.numpy.support import floats, ones, rows_at_a_time
from xformer.kernels.registry import Kernel, register
from xformer.ops.linear import as_rows

# --- layer_norm -----------------------------------------------------------------------------------------------------


def _layer_norm_forward(x: Any, weight: Any, bias: Any, *, epsilon: float, save: bool) -> tuple[Any, Any]:
    normalized = x - x.mean(axis=-1, keepdims=True)
    variance = np.vecdot(normalized, normalized)[..., None]
    variance /= x.shape[-1]
    variance += epsilon
    inverse = np.divide(1.0, np.sqrt(variance, out=variance), out=variance)
    normalized *= inverse
    y = normalized * weight if save else np.multiply(normalized, weight, out=normalized)
    if bias is not None:
        y += bias
    return y, (normalized, inverse, weight)


def _layer_norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    """With x^ the normalized rows and h = g w: dx = (h - mean(h) - x^ mean(h x^)) / sigma; a mean is a product."""
    normalized, inverse, weight = residuals
    g_rows, hat, inverse = as_rows(g), as_rows(normalized), inverse.reshape(-1, 1)
    dx, dweight, mean_weight = np.empty_like(g_rows), np.zeros_like(weight), weight / len(weight)
    for part in rows_at_a_time(g_rows, arrays=3):
        g_part, hat_part, work = g_rows[part], hat[part], dx[part]
        np.multiply(g_part, hat_part, out=work)
        dweight += work.sum(axis=0)
        hat_part *= (work @ mean_weight)[:, None]
        hat_part += (g_part @ mean_weight)[:, None]
        np.multiply(g_part, weight, out=work)
        work -= hat_part
        work *= inverse[part]
    return dx.reshape(g.shape), dweight, (g_rows.sum(axis=0) if needs[2] else None)


register(Kernel("numpy.layer_norm", "layer_norm", "numpy", floats, _layer_norm_forward, _layer_norm_vjp))

# --- relu and dropout ------------------------------------------------------------------------------------------------


def _chosen(choice: Any, x: Any) -> Any:
    """`x` where `choice` is True, else zero, whatever stands there.

    A product of bits is exact, and gives zero where a product of floats would turn infinity into NaN; it is twenty
    times faster than `np.where` on a random choice.
    """
    bits = np.dtype(f"{x.dtype.byteorder}u{x.itemsize}")
    y = choice.astype(bits)
    y *= x.view(bits)
    return y.view(x.dtype)


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = np.maximum(x, 0.0)
    return y, y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    return (_chosen(y > 0, g),)


register(Kernel("numpy.relu", "relu", "numpy", floats, _relu_forward, _relu_vjp))


def _dropout_forward(x: Any, keep: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    y = _chosen(keep, x)
    y *= 1.0 / keep_probability
    return y, keep


def _dropout_vjp(g: Any, keep: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _dropout_forward(g, keep, keep_probability=keep_probability, save=False)[0], None


def _dropout_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, keep = arrays
    return floats(arrays, static) if x.shape == keep.shape else "keep is broadcast"


register(Kernel("numpy.dropout", "dropout", "numpy", _dropout_supports, _dropout_forward, _dropout_vjp))

# --- embedding -----------------------------------------------------------------------------------------------------


def _embedding_forward(weight: Any, ids: Any, *, save: bool) -> tuple[Any, Any]:
    return weight.take(ids, axis=0), (ids, weight)


def _embedding_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    """Sort the ids, so that the rows of one token are neighbors and can be summed in one pass."""
    ids, weight = residuals
    dweight = np.zeros_like(weight)
    flat = ids.reshape(-1)
    if flat.size:
        order = flat.argsort(kind="stable")
        ordered = flat[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        dweight[ordered[starts]] = np.add.reduceat(as_rows(g)[order], starts, axis=0)
    return dweight, None


register(Kernel("numpy.embedding", "embedding", "numpy", floats, _embedding_forward, _embedding_vjp))

# --- cross_entropy ---------------------------------------------------------------------------------------------------

# Cross-entropy takes a few rows of logits at a time, each read once and kept in the cache through all passes.


def _cross_entropy_forward(
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


def _cross_entropy_vjp(
    g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
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


register(Kernel("numpy.cross_entropy", "cross_entropy", "numpy", floats, _cross_entropy_forward, _cross_entropy_vjp))
