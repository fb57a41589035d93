"""The sum of squares of all elements of several arrays, for clipping."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import Operation


def _forward(*arrays: Array, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(*arrays)
    wide = (xp.astype(x, accumulation_dtype(xp, x.dtype), copy=False) for x in arrays)
    return xp.sum(xp.stack([xp.sum(x * x, dtype=x.dtype) for x in wide])), arrays


def _vjp(g: Array, arrays: Any, needs: Any) -> tuple[Any, ...]:
    return tuple(2.0 * g * x for x in arrays)


_operation = Operation("squared_norm", "{x: (...) float}* -> ()", _forward, _vjp)


def squared_norm(*arrays: Array) -> Array:
    """Sum the squares of all elements of all arrays: a scalar, in float32 or wider."""
    return _operation(*arrays)
