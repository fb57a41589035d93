"""NumPy kernels: the same operations with buffers reused, passes merged and matrix products kept whole.

Each is tested equal to its portable definition. What a forward is given is never written; residuals that it made
belong to it, and a trace pulls each record back once, so derivatives may overwrite those.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from xformer.kernels import numpy_attention as numpy_attention
from xformer.kernels import numpy_attention_tiled as numpy_attention_tiled
from xformer.kernels import numpy_cross_entropy as numpy_cross_entropy
from xformer.kernels import numpy_gelu as numpy_gelu
from xformer.kernels import numpy_optimizer as numpy_optimizer
from xformer.kernels.numpy_support import floats, rows_at_a_time
from xformer.kernels.registry import Kernel, register
from xformer.ops.linear import as_rows

# --- linear ----------------------------------------------------------------------------------------------------------


def _linear_forward(x: Any, weight: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    y = as_rows(x) @ weight
    if bias is not None:
        y += bias
    return y.reshape(*x.shape[:-1], weight.shape[1]), (x, weight)


def _linear_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight = residuals
    g_rows = as_rows(g)
    dx = (g_rows @ weight.T).reshape(x.shape) if needs[0] else None
    dweight = None
    if needs[1]:
        # A weight given transposed (the tied output) gets its gradient in its own memory order.
        dweight = (g_rows.T @ as_rows(x)).T if weight.flags.f_contiguous else as_rows(x).T @ g_rows
    return dx, dweight, (g_rows.sum(axis=0) if needs[2] else None)


register(Kernel("numpy.linear", "linear", "numpy", floats, _linear_forward, _linear_vjp))

# --- project_heads ---------------------------------------------------------------------------------------------------

_LEAST_ROWS = 32  # fewer, as in decoding, cost less than bringing the matrices together


def _project_heads_supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, *maps = arrays
    if math.prod(x.shape[:2]) < _LEAST_ROWS:
        return f"less than {_LEAST_ROWS} rows"
    if len({bias is None for bias in maps[len(static["heads"]) :]}) > 1:
        return "some of the maps have a bias"
    return floats(arrays, static)


def _cut(joint: Any, x: Any, weights: Any, heads: Any) -> Iterator[Any]:
    """Each map's part of the joint rows, in heads: a view."""
    first = 0
    for weight, count in zip(weights, heads, strict=True):
        part = joint[:, first : first + weight.shape[1]]
        yield part.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)
        first += weight.shape[1]


def _project_heads_forward(x: Any, *maps: Any, heads: Any, save: bool) -> tuple[Any, Any]:
    """One product with all matrices side by side."""
    weights, biases = maps[: len(heads)], maps[len(heads) :]
    joint = np.concatenate(weights, axis=1) if len(weights) > 1 else weights[0]
    y = as_rows(x) @ joint
    if biases[0] is not None:
        y += np.concatenate(biases)
    return tuple(_cut(y, x, weights, heads)), (x, weights, joint)


def _project_heads_vjp(g: Any, residuals: Any, needs: Any, *, heads: Any) -> tuple[Any, ...]:
    x, weights, joint = residuals
    rows = as_rows(x)
    g_rows = np.empty((len(rows), joint.shape[1]), joint.dtype)
    for part, given in zip(_cut(g_rows, x, weights, heads), g, strict=True):
        part[...] = 0.0 if given is None else given
    dx = (g_rows @ joint.T).reshape(x.shape) if needs[0] else None
    ends = np.cumsum([weight.shape[1] for weight in weights])[:-1]
    dweights = [rows.T @ part for part in np.split(g_rows, ends, axis=1)]
    dbiases = np.split(g_rows.sum(axis=0), ends) if any(needs[-len(weights) :]) else [None] * len(weights)
    return dx, *dweights, *dbiases


register(
    Kernel(
        "numpy.project_heads",
        "project_heads",
        "numpy",
        _project_heads_supports,
        _project_heads_forward,
        _project_heads_vjp,
    )
)

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
    """Sort the ids, so that the rows of one token are neighbours and can be summed in one pass."""
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

# --- compiled --------------------------------------------------------------------------------------------------------

if importlib.util.find_spec("numba") is not None:  # registered last, they come first
    importlib.import_module("xformer.kernels.numpy_compiled")
    importlib.import_module("xformer.kernels.numpy_compiled_attention")
