"""Derivatives of functions that only move, copy or cast elements."""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import device as device_of
from xformer.errors import DifferentiationError
from xformer.tracing.rule import decomposition, defvjp, defvjp_sequence

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
    """Each copy contributes: view the copies as axes of their own and sum over them."""
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
