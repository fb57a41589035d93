"""Dropout with a mask as argument (Srivastava et al., 2014)."""

from __future__ import annotations

from numbers import Real
from typing import Any

from xformer.backends import Array, array_namespace, extra
from xformer.errors import ConfigError
from xformer.ops.operation import Operation, Signature


def apply_dropout(x: Array, mask: Array, keep_probability: float) -> Array:
    """Return x / keep_probability where the mask is True, else zero."""
    xp = array_namespace(x)
    return xp.where(mask, extra.cast_like(x * (1.0 / keep_probability), x), xp.zeros_like(x))


def _forward(x: Array, mask: Array, *, keep_probability: float, save: bool) -> tuple[Array, Any]:
    return apply_dropout(x, mask, keep_probability), mask


def _vjp(g: Array, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return apply_dropout(g, mask, keep_probability), None


_operation = Operation("dropout", "x: (...) float, mask: (...) bool -> (...)", _forward, _vjp)

_MASK = Signature("x: (...) float, mask: ~(...) bool", {})


def check_keep_probability(value: Any) -> None:
    """Raise ConfigError unless a value is a number above 0 and at most 1."""
    if not isinstance(value, Real) or not 0.0 < value <= 1.0:  # type: ignore[operator]
        raise ConfigError(f"keep_probability is {value!r}; expected a number above 0 and at most 1")


def dropout(x: Array, mask: Array, keep_probability: float) -> Array:
    """Set elements to zero where the mask is False, and divide the others by `keep_probability`.

    The mask is an argument, so the operation itself is not random.

    Args:
        x: Array of any shape, floating.
        mask: Boolean array that broadcasts to x, True = keep.
        keep_probability: Probability with which the mask was drawn.

    Returns:
        Array of the shape and dtype of x.

    Raises:
        ShapeError: If shapes or dtypes do not match.
    """
    check_keep_probability(keep_probability)
    if getattr(mask, "shape", None) != getattr(x, "shape", None):
        _MASK.check("dropout", (x, mask))
        mask = array_namespace(mask).broadcast_to(mask, x.shape)
    return _operation(x, mask, keep_probability=keep_probability)
