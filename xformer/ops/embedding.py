"""Embedding: rows of a weight by token id; and rotary positions."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import Array, array_namespace, dtype_name, extra
from xformer.ops.operation import FINITE, Operation
from xformer.ops.weights import InferenceWeight


def _times(x: Array, scale: float) -> Array:
    return x if scale == 1.0 else extra.cast_like(x * scale, x)


def _forward(weight: Array, ids: Array, *, scale: float, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(weight, ids)
    rows = xp.take(weight, xp.reshape(ids, (math.prod(ids.shape),)), axis=0)  # the standard's take accepts 1D indices
    return _times(xp.reshape(rows, (*ids.shape, weight.shape[1])), scale), (ids, weight)


def _vjp(g: Array, residuals: Any, needs: Any, *, scale: float) -> tuple[Any, ...]:
    ids, weight = residuals
    xp = array_namespace(g, weight)
    count = math.prod(ids.shape)
    rows = xp.reshape(_times(g, scale), (count, weight.shape[1]))
    zeros = xp.zeros_like(weight)
    return extra.scatter_add(zeros, xp.reshape(ids, (count,)), rows), None


_operation = Operation(
    "embedding",
    "weight: (vocabulary, features) float, ids: (...) int[0, vocabulary) -> (..., features)",
    _forward,
    _vjp,
    ranges={"scale": FINITE},
)


def embedding(weight: Array | InferenceWeight, ids: Array, *, scale: float = 1.0) -> Array:
    """Look up rows of a weight, and multiply them by a number.

    Args:
        weight: Array or InferenceWeight of shape (vocabulary, features).
        ids: Integers of any shape (...), in [0, vocabulary).
        scale: Factor of the rows.

    Returns:
        Array of shape (..., features).

    Raises:
        ShapeError: If shapes or dtypes do not match.
        DataError: If an id is out of range; checked where reading values is cheap, which it is not on a GPU.
    """
    if isinstance(weight, InferenceWeight):
        xp = array_namespace(weight.elements, ids)
        _operation.check(weight, ids)
        rows = weight.take(xp.reshape(ids, (math.prod(ids.shape),)))
        return _times(xp.reshape(rows, (*ids.shape, weight.shape[1])), scale)
    if hasattr(ids, "dtype") and dtype_name(ids.dtype) in ("uint8", "int8", "int16"):  # torch reads no rows by these
        ids = array_namespace(ids).astype(ids, array_namespace(ids).index_dtype)
    return _operation(weight, ids, scale=scale)


# --- Rotation of pairs of features, for rotary positions (Su et al., 2021, section 3.4.2) -----------------------------


def _rotate_forward(x: Array, cosine: Array, sine: Array, *, save: bool) -> tuple[Array, Any]:
    half = cosine.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    if x.shape[-1] > 2 * half:
        rotated.append(x[..., 2 * half :])
    return array_namespace(x).concat(rotated, axis=-1), (cosine, sine)


def _rotate_vjp(g: Array, residuals: Any, needs: Any) -> tuple[Any, ...]:
    cosine, sine = residuals
    return rotate(g, cosine, -sine), None, None


_rotate = Operation(
    "rotate",
    "x: (..., length, head_dim) float, cosine: (length, half) float, sine: (length, half) float "
    "-> (..., length, head_dim)",
    _rotate_forward,
    _rotate_vjp,
    conditions={"2 * half <= head_dim": lambda sizes: 2 * sizes["half"] <= sizes["head_dim"]},
)


def rotate(x: Array, cosine: Array, sine: Array) -> Array:
    """Rotate the pairs of features (i, i + half) by angles; features beyond the first 2 half pass unchanged.

    Args:
        x: Array of shape (batch, heads, length, head_dim), floating.
        cosine: Cosines of the angles, (length, half) with 2 half <= head_dim, in the dtype of x; a constant: no
            derivative is computed.
        sine: Sines of the angles, of the same shape.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ShapeError: If shapes or dtypes do not match.
    """
    return _rotate(x, cosine, sine)
