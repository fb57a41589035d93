"""Derivatives of functions that move, copy, cast, read, write or reduce elements."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import device, extra, is_integer
from xformer.backends import device as device_of
from xformer.errors import DifferentiationError
from xformer.tracing.record import base_function
from xformer.tracing.rule import decomposition, defvjp, defvjp_outputs, defvjp_sequence
from xformer.tracing.rules.elementwise import squared_size
from xformer.tree import is_array

# A pure change of shape is undone by the reverse change.
defvjp("reshape", lambda xp, g, x_shape, shape=None, *, copy=None: xp.reshape(g, x_shape))
defvjp("expand_dims", lambda xp, g, x_shape, *args, axis=0: xp.reshape(g, x_shape))
defvjp("squeeze", lambda xp, g, x_shape, axis=None: xp.reshape(g, x_shape))
defvjp("broadcast_to", lambda g, shape=None: g)
defvjp("flip", lambda xp, g, *, axis=None: xp.flip(g, axis=axis))
defvjp("matrix_transpose", lambda xp, g: xp.matrix_transpose(g))
defvjp("moveaxis", lambda xp, g, source, destination: xp.moveaxis(g, destination, source))
defvjp("to_device", lambda g, device=None, *, stream=None: g)
defvjp("tril", lambda xp, g, *, k=0: xp.tril(g, k=k))
defvjp("triu", lambda xp, g, *, k=0: xp.triu(g, k=k))

# The backward pass casts a cotangent to the dtype of its primal.
defvjp("astype", lambda g, dtype=None, *, copy=True, device=None: g)
defvjp("asarray", lambda g, *, dtype=None, device=None, copy=None: g)
defvjp("from_dlpack", lambda g, *, device=None, copy=None: g)


def _permute_dims(xp: Any, g: Any, axes: Any = None) -> Any:
    axes = [axis % g.ndim for axis in axes]
    return xp.permute_dims(g, tuple(sorted(range(len(axes)), key=axes.__getitem__)))


def _roll(xp: Any, g: Any, shift: Any = 0, *, axis: Any = None) -> Any:
    reverse = tuple(-s for s in shift) if isinstance(shift, tuple) else -shift
    return xp.roll(g, reverse, axis=axis)


def _tile(xp: Any, g: Any, x_shape: Any, repetitions: Any = ()) -> Any:
    """Each copy contributes: view the copies as separate axes and sum over them."""
    rank = max(len(x_shape), len(repetitions))
    shape = (1,) * (rank - len(x_shape)) + tuple(x_shape)
    copies = (1,) * (rank - len(repetitions)) + tuple(repetitions)
    split = tuple(size for pair in zip(copies, shape, strict=True) for size in pair)
    total = xp.sum(xp.reshape(g, split), axis=tuple(range(0, 2 * rank, 2)), dtype=g.dtype)
    return xp.reshape(total, x_shape)


def _repeat(xp: Any, g: Any, x_shape: Any, repeats: Any = 1, *, axis: Any = None) -> Any:
    if not isinstance(repeats, int):
        raise DifferentiationError("repeat with an array of counts has no derivative rule; use take(x, indices)")
    if axis is None or not x_shape:
        return xp.reshape(xp.sum(xp.reshape(g, (math.prod(x_shape), repeats)), axis=1, dtype=g.dtype), x_shape)
    axis = axis % len(x_shape)
    split = (*x_shape[: axis + 1], repeats, *x_shape[axis + 1 :])
    return xp.sum(xp.reshape(g, split), axis=axis + 1, dtype=g.dtype)


defvjp("permute_dims", _permute_dims)
defvjp("roll", _roll)
defvjp("tile", _tile)
defvjp("repeat", _repeat)


@defvjp_sequence("concat")
def _concat(xp: Any, g: Any, shapes: Any, *, axis: int | None = 0) -> list[Any]:
    if axis is None:
        shapes_flat, axis = [(math.prod(shape),) for shape in shapes], 0
        parts = _concat(xp, g, shapes_flat)
        return [xp.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
    axis = axis % g.ndim
    before = (slice(None),) * axis
    parts, start = [], 0
    for shape in shapes:
        parts.append(g[(*before, slice(start, start + shape[axis]), ...)])
        start += shape[axis]
    return parts


@defvjp_sequence("stack")
def _stack(xp: Any, g: Any, shapes: Any, *, axis: int = 0) -> list[Any]:
    return list(xp.unstack(g, axis=axis))


@defvjp_outputs("unstack")
def _unstack(xp: Any, g: Any, x: Any, outputs: Any, *, axis: int = 0) -> Any:
    return xp.stack(g, axis=axis)  # the VJP of slicing would allocate an array of zeros for each slice


@decomposition("full_like")
def _full_like(xp: Any, x: Any, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Any:
    """Only shape and dtype of `x` matter, so `x` may be tracked; a tracked fill value raises, as in `full`."""
    return xp.full(x.shape, fill_value, dtype=dtype or x.dtype, device=device or device_of(x))


@decomposition("broadcast_arrays")
def _broadcast_arrays(xp: Any, *arrays: Any) -> tuple[Any, ...]:
    shapes = [tuple(array.shape) for array in xp.base.broadcast_arrays(*map(xp.unwrap, arrays))]
    pairs = zip(arrays, shapes, strict=True)
    return tuple([x if tuple(x.shape) == shape else xp.broadcast_to(x, shape) for x, shape in pairs])


@decomposition("meshgrid")
def _meshgrid(xp: Any, *arrays: Any, indexing: str = "xy") -> tuple[Any, ...]:
    values = xp.base.meshgrid(*map(xp.unwrap, arrays), indexing=indexing)
    grids = []
    for position, (array, value) in enumerate(zip(arrays, values, strict=True)):
        axis = position
        if indexing == "xy" and len(arrays) > 1 and position < 2:
            axis = 1 - position
        shape = tuple(-1 if i == axis else 1 for i in range(max(len(arrays), 1)))
        grid = xp.broadcast_to(xp.reshape(array, shape), tuple(value.shape))
        grids.append(grid if xp.share_memory(value, array) else xp.asarray(grid, copy=True))
    return tuple(grids)


@decomposition("diff")
def _diff(xp: Any, x: Any, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None) -> Any:
    if n == 0:
        return x if xp.share_memory(xp.base.diff(xp.unwrap(x), n=0), x) else xp.asarray(x, copy=True)
    parts = [part for part in (prepend, x, append) if part is not None]
    x = xp.concat(parts, axis=axis) if len(parts) > 1 else x
    before = (slice(None),) * (axis % x.ndim)
    for _ in range(n):
        x = x[(*before, slice(1, None), ...)] - x[(*before, slice(None, -1), ...)]
    return x


# --- Reading and writing elements by position -------------------------------------------------------------------------


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


# --- Reductions and cumulative sums -----------------------------------------------------------------------------------


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
