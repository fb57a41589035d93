"""Masked softmax over the last axis."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace, extra
from xformer.errors import ConfigError
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
