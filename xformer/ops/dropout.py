"""Dropout with a mask that was drawn before (Srivastava et al., 2014)."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, array_namespace, extra
from xformer.ops.operation import Operation


def apply_keep(x: Array, keep: Array, keep_probability: float) -> Array:
    """Zero what is not kept and scale the rest, so that the expectation stays the same."""
    xp = array_namespace(x)
    return xp.where(keep, extra.cast_like(x * (1.0 / keep_probability), x), xp.zeros_like(x))


def _forward(x: Array, keep: Array, *, keep_probability: float, save: bool) -> tuple[Array, Any]:
    return apply_keep(x, keep, keep_probability), keep


def _vjp(g: Array, keep: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return apply_keep(g, keep, keep_probability), None


_operation = Operation(Implementation("dropout", _forward, _vjp))


def dropout(x: Array, keep: Array, keep_probability: float) -> Array:
    """Zero the elements where `keep` is False and divide the others by `keep_probability`.

    x: any shape; keep: boolean, the same shape. The mask is an argument, so the operation itself is not random.
    """
    return _operation(x, keep, keep_probability=keep_probability)
