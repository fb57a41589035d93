"""The scale of the gradients inside an optimizer's update: a scalar array, or None for 1; NaN skips the update.

Clipping, unscaling and the check for overflow thus need no host synchronization.
"""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, array_namespace
from xformer.tree import is_array


def scale_gradient(gradient: Array, grad_scale: Array | None) -> Array:
    """Multiply a gradient by the scale, in the gradient's dtype."""
    return gradient if grad_scale is None else gradient * array_namespace(gradient).astype(grad_scale, gradient.dtype)


def skip_if_nonfinite(grad_scale: Array | None, old: Array, new: Array) -> Array:
    """Return the new array, or the old one if the scale is NaN."""
    xp = array_namespace(new)
    return new if grad_scale is None else xp.where(xp.isnan(grad_scale), old, new)


def cast_number(number: float | Array, array: Array) -> Any:
    """Return a Python number as it is, and a scalar array in the dtype of `array`: a product keeps it."""
    return array_namespace(array).astype(number, array.dtype) if is_array(number) else number
