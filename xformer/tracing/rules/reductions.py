"""Derivatives of reductions and cumulative sums."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import device
from xformer.tracing.rule import decomposition, defvjp
from xformer.tracing.rules.elementwise import squared_size


def _axes(shape: tuple[int, ...], axis: Any) -> tuple[int, ...]:
    """Normalize an axis argument to a tuple of non-negative axes."""
    if axis is None or not shape:
        return tuple(range(len(shape)))
    return tuple(a % len(shape) for a in (axis if isinstance(axis, tuple) else (axis,)))


def _restore(xp: Any, value: Any, shape: tuple[int, ...], axis: Any, keepdims: bool) -> Any:
    """Restore the reduced axes with length one, so that `value` broadcasts against the input."""
    if keepdims:
        return value
    reduced = _axes(shape, axis)
    return xp.reshape(value, tuple(1 if i in reduced else size for i, size in enumerate(shape)))


def _sum(xp: Any, g: Any, x_shape: Any, *, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Any:
    return xp.broadcast_to(_restore(xp, g, x_shape, axis, keepdims), x_shape)


def _mean(xp: Any, g: Any, x_shape: Any, *, axis: Any = None, keepdims: bool = False) -> Any:
    count = math.prod(x_shape[i] for i in _axes(x_shape, axis))
    return xp.broadcast_to(_restore(xp, g / float(count or 1), x_shape, axis, keepdims), x_shape)


def _extreme(xp: Any, g: Any, x: Any, y: Any, *, axis: Any = None, keepdims: bool = False) -> Any:
    """Divide the cotangent of max or min equally among the elements that attain it."""
    is_extreme = x == _restore(xp, y, x.shape, axis, keepdims)
    share = xp.astype(is_extreme, g.dtype)
    share = share / xp.sum(share, axis=axis, keepdims=True)
    return share * _restore(xp, g, x.shape, axis, keepdims)


defvjp("sum", _sum)
defvjp("mean", _mean)
defvjp("max", _extreme)
defvjp("min", _extreme)


def _prod(xp: Any, g: Any, x: Any, *, axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Any:
    """Multiply the other elements by exclusive products from both sides, which is also correct for zeros."""
    shape, reduced = tuple(x.shape), _axes(tuple(x.shape), axis)
    remaining = tuple(i for i in range(len(shape)) if i not in reduced)
    order = (*remaining, *reduced)
    count = math.prod(shape[i] for i in reduced)
    rows = xp.reshape(xp.permute_dims(x, order), (*(shape[i] for i in remaining), count))
    ones = xp.ones((*(shape[i] for i in remaining), 1), dtype=x.dtype, device=device(x))
    columns = [rows[..., i : i + 1] for i in range(count)]
    left, right = [ones], [ones]
    for i in range(count - 1):
        left.append(left[-1] * columns[i])
        right.append(right[-1] * columns[count - 1 - i])
    products = [before * after for before, after in zip(left, reversed(right), strict=True)] if count else []
    product = xp.concat(products, axis=-1) if products else rows
    product = xp.reshape(product, tuple(shape[i] for i in order))
    inverse = tuple(sorted(range(len(order)), key=order.__getitem__))
    return xp.permute_dims(product, inverse) * _restore(xp, g, shape, axis, keepdims)


defvjp("prod", _prod)


def _cumulative_sum(
    xp: Any, g: Any, x_shape: Any, *, axis: Any = None, dtype: Any = None, include_initial: bool = False
) -> Any:
    """Accumulate the cotangents from the end, since each element enters every later sum."""
    if not x_shape:
        return g
    axis = 0 if axis is None else axis % len(x_shape)
    if include_initial:
        g = g[(*(slice(None) for _ in range(axis)), slice(1, None), ...)]
    return xp.flip(xp.cumulative_sum(xp.flip(g, axis=axis), axis=axis, dtype=g.dtype), axis=axis)


defvjp("cumulative_sum", _cumulative_sum)


@decomposition("cumulative_prod")
def _cumulative_prod(xp: Any, x: Any, /, *, axis: Any = None, dtype: Any = None, include_initial: bool = False) -> Any:
    """Decompose into one product after the other, which is also correct for zeros."""
    if x.ndim == 0:  # the sum of one number is its product
        return xp.cumulative_sum(x, axis=axis, dtype=dtype, include_initial=include_initial)
    axis = 0 if axis is None else axis % x.ndim
    x = x if dtype is None else xp.astype(x, dtype)
    rest = tuple(x.shape[:axis]) + tuple(x.shape[axis + 1 :])
    products = [xp.ones(rest, dtype=x.dtype, device=device(x))]
    for part in xp.unstack(x, axis=axis):
        products.append(products[-1] * part)
    products = products if include_initial else products[1:]
    return xp.stack(products, axis=axis) if products else x


@decomposition("var")
def _var(xp: Any, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
    """Decompose the variance into deviations, which avoids the cancellation of the mean of squares."""
    count = math.prod(x.shape[i] for i in _axes(tuple(x.shape), axis))
    squares = squared_size(xp, x - xp.mean(x, axis=axis, keepdims=True))
    total = xp.sum(squares, axis=axis, keepdims=keepdims, dtype=squares.dtype)
    degrees = xp.asarray(float(count) - correction, dtype=squares.dtype, device=device(x))
    return total / degrees


@decomposition("std")
def _std(xp: Any, x: Any, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Any:
    """Give equal elements, where the root has no derivative, the derivative zero."""
    variance = xp.var(x, axis=axis, correction=correction, keepdims=keepdims)
    is_zero = variance == 0.0
    return xp.where(is_zero, 0.0, xp.sqrt(xp.where(is_zero, 1.0, variance)))
