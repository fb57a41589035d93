"""Root mean square normalization (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, array_namespace
from xformer.ops.layer_norm import upcast_rows
from xformer.ops.operation import Operation


def _forward(x: Array, weight: Array, *, epsilon: float, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x, weight)
    wide, scale = upcast_rows(x)
    scaled_epsilon = epsilon if scale is None else epsilon * scale * scale
    inverse = 1.0 / xp.sqrt(xp.mean(wide * wide, axis=-1, keepdims=True) + scaled_epsilon)
    normalized = wide * inverse
    return xp.astype(normalized * weight, x.dtype, copy=False), (normalized, inverse, scale, weight)


def _vjp(g: Array, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    """With x^ the normalized rows and h = g weight: dx = (h - x^ mean(h x^)) / rms."""
    normalized, inverse, scale, weight = residuals
    xp = array_namespace(g, normalized, weight)
    g = xp.astype(g, normalized.dtype, copy=False)
    h = g * weight
    dx = inverse * (h - normalized * xp.mean(h * normalized, axis=-1, keepdims=True))
    return (dx if scale is None else dx * scale), (g * normalized if needs[1] else None)


_operation = Operation("rms_norm", _forward, _vjp)


def rms_norm(x: Array, weight: Array, *, epsilon: float = 1e-5) -> Array:
    """Divide rows by their root mean square, then multiply by `weight`.

    y = x / sqrt(mean(x^2) + epsilon) * weight (section 4). float16 and bfloat16 are normalized in float32.

    Args:
        x: Array of shape (..., features).
        weight: Array of shape (features,).
        epsilon: Added to the mean square.

    Returns:
        Array of the shape and dtype of x.
    """
    return _operation(x, weight, epsilon=epsilon)
