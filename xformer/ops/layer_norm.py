"""Layer normalization (Ba, Kiros and Hinton, 2016)."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.namespace import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import Operation


def _forward(x: Array, weight: Array, bias: Array | None, *, epsilon: float, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x, weight)
    wide = xp.astype(x, accumulation_dtype(xp, x.dtype), copy=False)
    centred = wide - xp.mean(wide, axis=-1, keepdims=True)
    variance = xp.mean(centred * centred, axis=-1, keepdims=True)
    inverse = 1.0 / xp.sqrt(variance + epsilon)
    normalized = centred * inverse
    y = normalized * weight
    y = y if bias is None else y + bias
    return xp.astype(y, x.dtype, copy=False), (normalized, inverse, weight)


def _vjp(g: Array, residuals: Any, needs: Any, *, epsilon: float) -> tuple[Any, ...]:
    """With x^ the normalized rows and h = g w: dx = (h - mean(h) - x^ mean(h x^)) / sigma."""
    normalized, inverse, weight = residuals
    xp = array_namespace(g, normalized, weight)
    g = xp.astype(g, normalized.dtype, copy=False)
    h = g * weight
    dx = inverse * (
        h - xp.mean(h, axis=-1, keepdims=True) - normalized * xp.mean(h * normalized, axis=-1, keepdims=True)
    )
    # The sweep sums the two parameter cotangents over all rows.
    return dx, (g * normalized if needs[1] else None), (g if needs[2] else None)


_operation = Operation(Implementation("layer_norm", _forward, _vjp))


def layer_norm(x: Array, weight: Array, bias: Array | None, *, epsilon: float = 1e-5) -> Array:
    """Shift and scale each row to mean 0 and variance 1, then by `weight` and `bias`.

    x: (..., features); weight, bias: (features,). The variance is the biased one (divided by the number of
    features); epsilon is added to it. float16 and bfloat16 are normalized in float32.
    """
    return _operation(x, weight, bias, epsilon=epsilon)
