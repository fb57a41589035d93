"""One update of Adafactor (Shazeer and Stern, 2018, algorithms 4 and 5).

As in torch.optim.Adafactor: sums over rows and columns are means, and epsilon bounds the root of the second moment
from below, where the paper adds it to every squared gradient.
"""

from __future__ import annotations

import math
from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, accumulation_dtype, array_namespace, device
from xformer.ops.factor import times, unless_nan
from xformer.ops.operation import Operation


def _forward(
    parameter: Array,
    gradient: Array,
    row: Any,
    column: Any,
    second: Any,
    factor: Array | None,
    *,
    step_size: float,
    beta2: float,
    epsilon: float | None,
    min_scale: float | None,
    threshold: float,
    keep: float,
    save: bool,
) -> tuple[Any, Any]:
    xp = array_namespace(parameter, gradient)
    wide = accumulation_dtype(xp, parameter.dtype)
    p, g = (xp.astype(array, wide, copy=False) for array in (parameter, gradient))
    g, given = times(g, factor), (parameter, row, column, second)
    epsilon = float(xp.finfo(wide).eps) if epsilon is None else epsilon
    squares = g * g
    if second is None:
        row = beta2 * row + (1.0 - beta2) * _mean(squares, -1)
        column = beta2 * column + (1.0 - beta2) * _mean(squares, -2)
        estimate = row / _at_least(_mean(row, -2), epsilon) * column
    else:
        estimate = second = beta2 * second + (1.0 - beta2) * squares
    update = g / xp.sqrt(_at_least(estimate, epsilon * epsilon))
    size = step_size / _at_least(_root_mean_square(update) / threshold, 1.0)
    if min_scale is not None:
        size = size * _at_least(_root_mean_square(p), min_scale)
    updated = xp.astype(keep * p - size * update, parameter.dtype, copy=False), row, column, second
    pairs = zip(given, updated, strict=True)
    return tuple(None if new is None else unless_nan(factor, old, new) for old, new in pairs), None


def _root_mean_square(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.sqrt(xp.sum(x * x) / max(1, math.prod(x.shape)))


def _mean(x: Array, axis: int) -> Array:
    """The mean along an axis, which stays; zero where it has no elements."""
    return array_namespace(x).sum(x, axis=axis, keepdims=True) / max(1, x.shape[axis])


def _at_least(x: Array, least: float) -> Array:
    xp = array_namespace(x)
    return xp.maximum(x, xp.asarray(least, dtype=x.dtype, device=device(x)))


_operation = Operation(Implementation("adafactor", _forward, vjp=None))


def adafactor(
    parameter: Array,
    gradient: Array,
    row: Array | None,
    column: Array | None,
    second: Array | None,
    factor: Array | None = None,
    **settings: Any,
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Return the updated (parameter, row, column, second).

    row, column: factors of the second moment of a parameter (..., rows, columns), as (..., rows, 1) and
    (..., 1, columns); second: the whole of it, where those are None; factor: of the gradient, as ops/factor.py has it.
    `settings`, all of them needed:

    step_size: relative to the root mean square of the parameter, which counts as `min_scale` at least; absolute
    where min_scale is None
    beta2: of the second moment's running mean
    epsilon: lower bound of the root of the second moment (None: the dtype's precision)
    threshold: updates whose root mean square is larger are scaled down to it (section 6 of the paper)
    keep: what weight decay leaves of the parameter, 1 being all

    The arrays given may be overwritten: use only what is returned.
    """
    result: tuple[Array, Array | None, Array | None, Array | None] = _operation(
        parameter, gradient, row, column, second, factor, **settings
    )
    return result


def zero_factors(parameter: Array) -> tuple[Array | None, Array | None, Array | None]:
    """(row, column, second) to start from: zeros in float32 or wider; matrices have factors, all else the whole."""
    xp = array_namespace(parameter)
    shape = tuple(parameter.shape)
    options = {"dtype": accumulation_dtype(xp, parameter.dtype), "device": device(parameter)}
    if len(shape) < 2:
        return None, None, xp.zeros(shape, **options)
    return xp.zeros((*shape[:-1], 1), **options), xp.zeros((*shape[:-2], 1, shape[-1]), **options), None
