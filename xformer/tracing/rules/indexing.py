"""Derivatives of reading and writing elements by position."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import device, extra, is_integer
from xformer.tracing.record import base_function
from xformer.tracing.rule import decomposition, defvjp
from xformer.tree import is_array


def _take(xp: Any, g: Any, x_shape: Any, indices: Any, *, axis: int | None = None) -> Any:
    """Add each cotangent to the row that was read; rows that were read twice get both."""
    if not x_shape:
        return xp.sum(g)
    axis = 0 if axis is None else axis % len(x_shape)
    # The standard has indices with one axis, NumPy and torch with any number.
    g = xp.reshape(g, (*x_shape[:axis], math.prod(indices.shape), *x_shape[axis + 1 :]))
    g, indices = xp.moveaxis(g, axis, 0), xp.reshape(indices, (-1,))
    rest = tuple(x_shape[:axis]) + tuple(x_shape[axis + 1 :])
    indices = xp.where(indices < 0, indices + x_shape[axis], indices)
    zeros = xp.zeros((x_shape[axis], *rest), dtype=g.dtype, device=device(g))
    return xp.moveaxis(extra.scatter_add(zeros, indices, g), 0, axis)


def _take_along_axis(xp: Any, g: Any, x_shape: Any, indices: Any, *, axis: int = -1) -> Any:
    """Scatter the gradient into the flattened input."""
    axis = axis % len(x_shape)
    moved_shape = (*x_shape[:axis], *x_shape[axis + 1 :], x_shape[axis])
    g, indices = xp.moveaxis(g, axis, -1), xp.moveaxis(indices, axis, -1)
    indices = xp.where(indices < 0, indices + x_shape[axis], indices)
    # The leading axes of indices may be broadcast against those of x: repeat rows where x has only one.
    row = xp.reshape(
        xp.arange(math.prod(moved_shape[:-1]), dtype=indices.dtype, device=device(g)), (*moved_shape[:-1], 1)
    )
    flat = xp.reshape(xp.broadcast_to(row * x_shape[axis] + indices, g.shape), (-1,))
    zeros = xp.zeros((math.prod(x_shape),), dtype=g.dtype, device=device(g))
    total = extra.scatter_add(zeros, flat, xp.reshape(g, (-1,)))
    return xp.moveaxis(xp.reshape(total, moved_shape), -1, axis)


def _get_item(xp: Any, g: Any, x_shape: Any, key: Any) -> Any:
    """Write the cotangent to the elements that were read; positions in integer arrays or lists accumulate."""
    keys = key if isinstance(key, tuple) else (key,)
    keys = tuple(xp.asarray(item) if isinstance(item, list) else item for item in keys)
    positions = [item for item in keys if _is_position(item)]
    if len(positions) == len(keys) and any(map(is_array, keys)):
        return _get_items(xp, g, x_shape, keys)
    if any(is_array(position) and position.ndim for position in positions):  # with slices
        size = math.prod(x_shape)
        numbers = xp.reshape(xp.arange(size, device=device(g)), x_shape)[keys]
        zeros = xp.zeros((size,), dtype=g.dtype, device=device(g))
        total = extra.scatter_add(zeros, xp.reshape(numbers, (-1,)), xp.reshape(g, (-1,)))
        return xp.reshape(total, x_shape)
    zeros = xp.zeros(x_shape, dtype=g.dtype, device=device(g))
    if any(item is None for item in keys):  # write to where the new axes were put, not through them
        keys = tuple(item for item in keys if item is not None)
        g = xp.reshape(g, zeros[keys].shape)
    return base_function(xp, "setitem")(zeros, g, keys)


def _is_position(item: Any) -> bool:
    return isinstance(item, int) or (is_array(item) and is_integer(item.dtype))


def _get_items(xp: Any, g: Any, x_shape: Any, keys: tuple[Any, ...]) -> Any:
    """x[i, j, ...] with integer arrays for the leading axes: number those positions, then scatter."""
    position: Any = 0
    for item, size in zip(keys, x_shape, strict=False):
        index = xp.where(item < 0, item + size, item) if is_array(item) else item % size
        position = position * size + index
    leading, rest = math.prod(x_shape[: len(keys)]), tuple(x_shape[len(keys) :])
    zeros = xp.zeros((leading, *rest), dtype=g.dtype, device=device(g))
    updates = xp.reshape(g, (math.prod(position.shape), *rest))
    return xp.reshape(extra.scatter_add(zeros, xp.reshape(position, (-1,)), updates), x_shape)


def _set_new(xp: Any, g: Any, key: Any) -> Any:
    """Return the cotangents of the written values; of values written to the same element, one remains."""
    g_new = g[key]
    if any(isinstance(item, list) or _is_position(item) for item in (key if isinstance(key, tuple) else (key,))):
        numbers = xp.reshape(xp.arange(math.prod(g_new.shape), device=device(g)), tuple(g_new.shape))
        written = base_function(xp, "setitem")(xp.zeros(g.shape, dtype=numbers.dtype, device=device(g)), numbers, key)
        g_new = xp.where(written[key] == numbers, g_new, 0.0)
    return g_new


defvjp("take", _take)
defvjp("take_along_axis", _take_along_axis)
defvjp("getitem", _get_item)
defvjp("setitem", lambda xp, g, key: base_function(xp, "setitem")(g, 0.0, key), _set_new)  # zero if overwritten
# scatter_add(target, indices, updates)
defvjp("scatter_add", lambda g, indices: g, lambda xp, g, indices: xp.take(g, indices, axis=0), positions=(0, 2))


def _unique(name: str) -> None:
    """Decompose unique_values and its variants into a search in the base namespace and a read of first occurrences."""

    @decomposition(name)
    def unique(xp: Any, x: Any, /) -> Any:
        indices = xp.base.unique_all(xp.unwrap(x)).indices
        values = xp.take(xp.reshape(x, (-1,)), indices, axis=0)
        if name == "unique_values":
            return values
        return xp.wrap(getattr(xp.base, name)(xp.unwrap(x)))._replace(values=values)


for _name in ("unique_all", "unique_counts", "unique_inverse", "unique_values"):
    _unique(_name)


@decomposition("sort")
def _sort(xp: Any, x: Any, /, *, axis: int = -1, descending: bool = False, stable: bool = True) -> Any:
    order = xp.argsort(x, axis=axis, descending=descending, stable=stable)
    return xp.take_along_axis(x, order, axis=axis) if x.ndim else xp.asarray(x, copy=True)


@decomposition("top_k")
def _top_k(xp: Any, x: Any, /, k: int) -> tuple[Any, Any]:
    indices = xp.wrap(xp.base.top_k(xp.unwrap(x), k)[1])
    return xp.take_along_axis(x, indices, axis=-1), indices
