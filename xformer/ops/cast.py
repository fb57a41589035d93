"""Casts of many arrays, for mixed precision."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, array_namespace
from xformer.ops.operation import Operation


def _forward(*arrays: Array, dtype: str, save: bool) -> tuple[tuple[Array, ...], Any]:
    xp = array_namespace(*arrays)
    target = xp.dtype_named(dtype)
    return tuple(xp.astype(x, target) for x in arrays), None


def _vjp(g: Any, residuals: Any, needs: Any, *, dtype: str) -> tuple[Any, ...]:
    return tuple(g)  # the backward pass casts cotangents to the dtypes of their arrays


_operation = Operation("cast", "{x: (...) float}* -> (...)", _forward, _vjp)


def cast(*arrays: Array, dtype: str) -> tuple[Array, ...]:
    """Cast arrays to one floating dtype.

    Args:
        *arrays: Floating arrays of any shapes.
        dtype: Name of the dtype, such as "bfloat16".

    Returns:
        New arrays of that dtype.
    """
    return _operation(*arrays, dtype=dtype) if arrays else ()
