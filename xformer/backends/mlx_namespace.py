"""mlx.core with the names and keywords of the Array API standard that it lacks in version 0.32.

Arrays of MLX have no device: they are in memory that all devices share, and functions run on the default device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mlx import core as _core
from mlx.core import *  # noqa: F403  (`max`, `any` and others are MLX's below)

from xformer.errors import BackendError

__array_namespace_info__ = _core.__array_namespace_info__
bool = _core.bool_


def _on_default_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a creation function that takes `device=None`, and nothing else for it."""

    @functools.wraps(function)
    def create(*args: Any, device: Any = None, **keywords: Any) -> Any:
        if device is not None:
            raise BackendError(f"device is {device!r}; MLX computes on its default device, see mx.set_default_device")
        return function(*args, **keywords)

    return create


for _name in (
    *("asarray", "empty", "empty_like", "eye", "full", "full_like", "linspace"),
    *("ones", "ones_like", "zeros", "zeros_like"),
):
    globals()[_name] = _on_default_device(getattr(_core, _name))


@_on_default_device
def arange(start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None) -> Any:
    """Return evenly spaced values; of int64, as the standard's default integers, if all arguments are integers."""
    start, stop = (0, start) if stop is None else (start, stop)
    if dtype is None and isinstance(start, int) and isinstance(stop, int) and isinstance(step, int):
        dtype = _core.int64
    return _core.arange(start, stop, step, dtype=dtype)


@_on_default_device
def astype(x: Any, dtype: Any, /, *, copy: Any = True) -> Any:
    """Cast; a copy is never needed, since functions of MLX do not write into their arguments."""
    return _core.astype(x, dtype)


def clip(x: Any, /, min: Any = None, max: Any = None) -> Any:
    """Clamp x between bounds."""
    return x if min is None and max is None else _core.clip(x, min, max)


def sum(x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: Any = False) -> Any:
    """Sum in a dtype."""
    return _core.sum(x if dtype is None else _core.astype(x, dtype), axis=axis, keepdims=keepdims)


def cumulative_sum(x: Any, /, *, axis: Any = None, dtype: Any = None, include_initial: Any = False) -> Any:
    """Sum up along an axis."""
    axis = 0 if axis is None else axis
    total = _core.cumsum(x if dtype is None else _core.astype(x, dtype), axis=axis)
    if not include_initial:
        return total
    first = _core.zeros_like(_core.take(total, _core.array([0]), axis=axis))
    return _core.concatenate([first, total], axis=axis)


def var(x: Any, /, *, axis: Any = None, correction: Any = 0, keepdims: Any = False) -> Any:
    """Compute the variance."""
    return _core.var(x, axis=axis, ddof=int(correction), keepdims=keepdims)


def argsort(x: Any, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> Any:
    """Return the order of values; equal values keep theirs, as MLX's sort is stable."""
    if not descending:
        return _core.argsort(x, axis=axis)
    order = _core.argsort(_core.flip(x, axis=axis), axis=axis)
    return _core.flip(x.shape[axis] - 1 - order, axis=axis)


def sort(x: Any, /, *, axis: int = -1, descending: Any = False, stable: Any = True) -> Any:
    """Sort values."""
    result = _core.sort(x, axis=axis)
    return _core.flip(result, axis=axis) if descending else result


def roll(x: Any, /, shift: Any, *, axis: Any = None) -> Any:
    """Shift elements along an axis."""
    return _core.roll(x, shift, axis)
