"""The factor that an update counts gradients by: a scalar, or None; where it is NaN nothing is updated.

So a GPU can clip, and keep out what is not finite, while the host has yet to find out.
"""

from __future__ import annotations

from xformer.backends import Array, array_namespace


def times(gradient: Array, factor: Array | None) -> Array:
    """A gradient, in its dtype, so many times."""
    return gradient if factor is None else gradient * array_namespace(gradient).astype(factor, gradient.dtype)


def unless_nan(factor: Array | None, old: Array, new: Array) -> Array:
    """The new array, or where the factor is NaN the old one."""
    xp = array_namespace(new)
    return new if factor is None else xp.where(xp.isnan(factor), old, new)
