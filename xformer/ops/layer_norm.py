"""Layer normalization (Ba, Kiros and Hinton, 2016)."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import Operation


def widened_rows(x: Array) -> tuple[Array, Array | None]:
    """Rows in float32 or wider: as they are, or float16 and bfloat16 ones times a scale that makes them safe to square.

    Returns (rows, scale), the scale being (..., 1) and at most 1, or None where nothing was scaled. A norm of scaled
    rows is that of the rows themselves when its epsilon is scaled too, by the square.
    """
    xp = array_namespace(x)
    dtype = accumulation_dtype(xp, x.dtype)
    if dtype == x.dtype:
        return x, None
    wide = xp.astype(x, dtype)
    scale = 1.0 / xp.clip(xp.max(xp.abs(wide), axis=-1, keepdims=True), min=1.0)
    return wide * scale, scale


def _forward(x: Array, weight: Array, bias: Array | None, *, epsilon: float, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x, weight)
    wide, scale = widened_rows(x)
    centred = wide - xp.mean(wide, axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    inverse = 1.0 / xp.sqrt(variance + (epsilon if scale is None else epsilon * scale * scale))
    normalized = centred * inverse
    y = normalized * weight
    y = y if bias is None else y + bias
    return xp.astype(y, x.dtype, copy=False), (normalized, inverse, scale, weight)


def _vjp(g: Array, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    """With x^ the normalized rows and h = g w: dx = (h - mean(h) - x^ mean(h x^)) / sigma."""
    normalized, inverse, scale, weight = residuals
    xp = array_namespace(g, normalized, weight)
    g = xp.astype(g, normalized.dtype, copy=False)
    h = g * weight
    dx = inverse * (
        h - xp.mean(h, axis=-1, keepdims=True) - normalized * xp.mean(h * normalized, axis=-1, keepdims=True)
    )
    # The sweep sums the two parameter cotangents over all rows.
    return (
        dx if scale is None else dx * scale,
        g * normalized if needs[1] else None,
        g if needs[2] else None,
    )


_operation = Operation(Implementation("layer_norm", _forward, _vjp))


def layer_norm(x: Array, weight: Array, bias: Array | None, *, epsilon: float = 1e-5) -> Array:
    """Shift and scale each row to mean 0 and variance 1, then by `weight` and `bias`.

    x: (..., features); weight, bias: (features,). The variance is the biased one (divided by the number of
    features); epsilon is added to it. float16 and bfloat16 are normalized in float32.
    """
    return _operation(x, weight, bias, epsilon=epsilon)
