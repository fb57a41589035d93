"""Rotation of pairs of features, for rotary positions (Su et al., 2021, section 3.4.2)."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, array_namespace
from xformer.ops.operation import Operation


def _forward(x: Array, cosine: Array, sine: Array, *, save: bool) -> tuple[Array, Any]:
    half = cosine.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = [first * cosine - second * sine, second * cosine + first * sine]
    if x.shape[-1] > 2 * half:
        rotated.append(x[..., 2 * half :])
    return array_namespace(x).concat(rotated, axis=-1), (cosine, sine)


def _vjp(g: Array, residuals: Any, needs: Any) -> tuple[Any, ...]:
    cosine, sine = residuals
    return rotate(g, cosine, -sine), None, None


_operation = Operation(
    "rotate",
    "x: (..., length, head_dim) float, cosine: (length, half) float, sine: (length, half) float "
    "-> (..., length, head_dim)",
    _forward,
    _vjp,
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
    return _operation(x, cosine, sine)
