"""The sum of squares of all elements, for clipping."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.namespace import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import Operation


def _forward(x: Array, *, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(x)
    wide = xp.astype(x, accumulation_dtype(xp, x.dtype), copy=False)
    return xp.sum(wide * wide, dtype=wide.dtype), x


def _vjp(g: Array, x: Any, needs: Any) -> tuple[Any, ...]:
    return (2.0 * g * x,)


_operation = Operation(Implementation("squared_norm", _forward, _vjp))


def squared_norm(x: Array) -> Array:
    """Sum the squares of all elements: a scalar, in float32 or wider."""
    return _operation(x)
