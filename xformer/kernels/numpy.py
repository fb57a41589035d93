"""NumPy kernels: the same operations with buffers reused, passes merged and matrix products kept whole.

Each is tested equal to its portable definition. Residuals belong to the kernel that made them, and a trace pulls
each record back once, so derivatives may overwrite residuals.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.kernels import numpy_attention as numpy_attention
from xformer.kernels.numpy_support import floats, rows_at_a_time
from xformer.kernels.registry import Kernel, register

# --- linear ----------------------------------------------------------------------------------------------------------


def _linear_forward(x: Any, weight: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    rows = x.reshape(-1, x.shape[-1])
    y = rows @ weight
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], weight.shape[1]), (x, weight)


def _linear_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight = residuals
    g_rows = g.reshape(-1, g.shape[-1])
    dx = (g_rows @ weight.T).reshape(x.shape) if needs[0] else None
    dweight = None
    if needs[1]:
        rows = x.reshape(-1, x.shape[-1])
        # A weight given transposed (the tied output) gets its gradient in its own memory order.
        dweight = (g_rows.T @ rows).T if weight.flags.f_contiguous and weight.ndim == 2 else rows.T @ g_rows
    return dx, dweight, (g_rows.sum(axis=0) if needs[2] else None)


register(Kernel("numpy.linear", "linear", "numpy", floats, _linear_forward, _linear_vjp))

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
    normalized, inverse, weight = residuals
    features = weight.shape[0]
    dbias = g.reshape(-1, features).sum(axis=0) if needs[2] else None
    work = g * normalized
    dweight = work.reshape(-1, features).sum(axis=0) if needs[1] else None
    dx = None
    if needs[0]:
        # mean(h x^) with h = g w is (g x^) @ w / n, a matrix-vector product.
        projection = (work.reshape(-1, features) @ weight).reshape(inverse.shape)
        projection /= features
        dx = np.multiply(g, weight, out=work)
        dx -= dx.mean(axis=-1, keepdims=True)
        normalized *= projection
        dx -= normalized
        dx *= inverse
    return dx, dweight, dbias


register(Kernel("numpy.layer_norm", "layer_norm", "numpy", floats, _layer_norm_forward, _layer_norm_vjp))

# --- relu and dropout --------------------------------------------------------------------------------------------------


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = np.maximum(x, 0.0)
    return y, y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    return (g * (y > 0),)


register(Kernel("numpy.relu", "relu", "numpy", floats, _relu_forward, _relu_vjp))


def _dropout_forward(x: Any, keep: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    y = x * keep
    y *= 1.0 / keep_probability
    return y, keep


def _dropout_vjp(g: Any, keep: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _dropout_forward(g, keep, keep_probability=keep_probability, save=False)[0], None


register(Kernel("numpy.dropout", "dropout", "numpy", floats, _dropout_forward, _dropout_vjp))

# --- embedding -----------------------------------------------------------------------------------------------------


def _embedding_forward(weight: Any, ids: Any, *, save: bool) -> tuple[Any, Any]:
    return weight.take(ids, axis=0), (ids, weight)


def _embedding_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    """Sort the ids, so that the rows of one token are neighbours and can be summed in one pass."""
    ids, weight = residuals
    dweight = np.zeros_like(weight)
    flat = ids.reshape(-1)
    if flat.size:
        order = flat.argsort(kind="stable")
        ordered = flat[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=ordered[0] - 1))
        dweight[ordered[starts]] = np.add.reduceat(g.reshape(flat.size, -1)[order], starts, axis=0)
    return dweight, None


register(Kernel("numpy.embedding", "embedding", "numpy", floats, _embedding_forward, _embedding_vjp))

# --- cross_entropy --------------------------------------------------------------------------------------------------


def _cross_entropy_forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, save: bool
) -> tuple[Any, Any]:
    classes = logits.shape[-1]
    rows, flat = logits.reshape(-1, classes), labels.reshape(-1)
    losses = np.empty(flat.shape, dtype=logits.dtype)
    powers = np.empty_like(rows) if save else None
    inverse = np.empty((flat.size, 1), dtype=logits.dtype)
    for part in rows_at_a_time(rows):
        x = rows[part]
        top = x.max(axis=-1, keepdims=True)
        e = np.subtract(x, top, out=None if powers is None else powers[part])
        np.exp(e, out=e)
        total = e.sum(axis=-1, keepdims=True)
        np.divide(1.0, total, out=inverse[part])
        log_total = np.log(total)[:, 0] + top[:, 0]
        picked = np.take_along_axis(x, flat[part, None], axis=-1)[:, 0]
        loss = (1.0 - label_smoothing) * (log_total - picked)
        if label_smoothing:
            loss += label_smoothing * (log_total - x.mean(axis=-1))
        losses[part] = np.where(flat[part] != pad_id, loss, 0.0)
    return losses.reshape(labels.shape), (powers, inverse, flat, logits.shape)


def _cross_entropy_vjp(g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float) -> tuple[Any, ...]:
    powers, inverse, flat, shape = residuals
    g = np.where(flat != pad_id, g.reshape(-1), 0.0).astype(powers.dtype, copy=False)[:, None]
    inverse *= g
    low = g * (label_smoothing / shape[-1])
    for part in rows_at_a_time(powers):
        p = powers[part]
        p *= inverse[part]
        if label_smoothing:
            p -= low[part]
    powers[np.arange(flat.size), flat] -= (1.0 - label_smoothing) * g[:, 0]
    return powers.reshape(shape), None


register(
    Kernel("numpy.cross_entropy", "cross_entropy", "numpy", floats, _cross_entropy_forward, _cross_entropy_vjp)
)

# --- optimizer ------------------------------------------------------------------------------------------------------

_ADAM_CHUNK = 16384  # elements: five arrays of this size stay in a core's second-level cache


def _adam_supports(arrays: Any, static: Any) -> str | None:
    if any(not (array.flags.c_contiguous or array.flags.f_contiguous) for array in arrays):
        return "an array is not contiguous"
    if len({array.flags.c_contiguous for array in arrays if array.ndim > 1}) > 1:
        return "arrays differ in memory order"
    if not all(array.flags.writeable for array in arrays):
        return "an array is read-only"
    return floats(arrays, static)


def _adam_forward(
    parameter: Any,
    gradient: Any,
    first: Any,
    second: Any,
    *,
    step_size: float,
    beta1: float,
    beta2: float,
    second_scale: float,
    epsilon: float,
    save: bool,
) -> tuple[Any, Any]:
    flat = [array.reshape(-1, order="A") for array in (parameter, gradient, first, second)]
    work = np.empty(min(_ADAM_CHUNK, parameter.size), dtype=parameter.dtype)
    for start in range(0, parameter.size, _ADAM_CHUNK):
        p, g, m, v = (array[start : start + _ADAM_CHUNK] for array in flat)
        t = work[: p.size]
        m *= beta1
        m += np.multiply(g, 1.0 - beta1, out=t)
        np.multiply(g, g, out=t)
        t *= 1.0 - beta2
        v *= beta2
        v += t
        np.multiply(v, second_scale, out=t)
        np.sqrt(t, out=t)
        t += epsilon
        np.divide(m, t, out=t)
        t *= step_size
        p -= t
    return (parameter, first, second), None


def _adam_vjp(g: Any, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    raise NotImplementedError("adam has no derivative")


register(Kernel("numpy.adam", "adam", "numpy", _adam_supports, _adam_forward, _adam_vjp))
