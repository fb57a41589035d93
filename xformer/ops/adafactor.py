"""One update of Adafactor (Shazeer and Stern, 2018, algorithms 4 and 5).

As in torch.optim.Adafactor, sums over rows and columns are means, and epsilon bounds the root of the second moment from
below, where the paper adds it to every squared gradient.
"""

from __future__ import annotations

import math
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace, device
from xformer.ops.grad_scale import scale_gradient, skip_if_nonfinite


def adafactor(
    parameter: Array,
    gradient: Array,
    row: Any,
    column: Any,
    variance: Any,
    grad_scale: Array | None = None,
    *,
    step_size: float,
    beta2: float,
    epsilon: float | None,
    min_scale: float | None,
    clip_threshold: float,
    decay: float,
) -> tuple[Any, ...]:
    """Update one parameter.

    Args:
        parameter: Array of shape (..., rows, columns), or with fewer than two axes.
        gradient: Array of the parameter's shape.
        row: Mean squared gradients of the rows, (..., rows, 1); None for parameters with fewer than two axes.
        column: Mean squared gradients of the columns, (..., 1, columns); None as above.
        variance: Mean squared gradients of the elements, for parameters with fewer than two axes; else None.
        grad_scale: Scale of the gradient (see ops/grad_scale.py).
        step_size: Step size relative to the root mean square of the parameter; absolute if min_scale is None.
        beta2: Decay rate of the mean squared gradients.
        epsilon: Lower bound of the root of the second moment; None is the dtype's precision.
        min_scale: Lower bound of the parameter's root mean square.
        clip_threshold: Updates with a larger root mean square are scaled down to it (section 6 of the paper).
        decay: Factor that weight decay multiplies the parameter by; 1 is none.

    Returns:
        The updated (parameter, row, column, variance).
    """
    xp = array_namespace(parameter, gradient)
    wide = accumulation_dtype(xp, parameter.dtype)
    p, g = (xp.astype(array, wide, copy=False) for array in (parameter, gradient))
    g, old = scale_gradient(g, grad_scale), (parameter, row, column, variance)
    epsilon = float(xp.finfo(wide).eps) if epsilon is None else epsilon
    squares = g * g
    if variance is None:
        row = beta2 * row + (1.0 - beta2) * _mean(squares, -1)
        column = beta2 * column + (1.0 - beta2) * _mean(squares, -2)
        estimate = row / _at_least(_mean(row, -2), epsilon) * column
    else:
        estimate = variance = beta2 * variance + (1.0 - beta2) * squares
    update = g / xp.sqrt(_at_least(estimate, epsilon * epsilon))
    step = step_size / _at_least(_root_mean_square(update) / clip_threshold, 1.0)
    if min_scale is not None:
        step = step * _at_least(_root_mean_square(p), min_scale)
    new = xp.astype(decay * p - step * update, parameter.dtype, copy=False), row, column, variance
    pairs = zip(old, new, strict=True)
    return tuple(None if after is None else skip_if_nonfinite(grad_scale, before, after) for before, after in pairs)


def _root_mean_square(x: Array) -> Array:
    xp = array_namespace(x)
    return xp.sqrt(xp.sum(x * x) / max(1, math.prod(x.shape)))


def _mean(x: Array, axis: int) -> Array:
    """Return the mean along an axis, which is kept; zero for an empty axis."""
    return array_namespace(x).sum(x, axis=axis, keepdims=True) / max(1, x.shape[axis])


def _at_least(x: Array, bound: float) -> Array:
    xp = array_namespace(x)
    return xp.maximum(x, xp.full((), bound, dtype=x.dtype, device=device(x)))


def zero_factors(parameter: Array) -> tuple[Array | None, Array | None, Array | None]:
    """Return the initial (row, column, variance) of a parameter: zeros, in float32 or wider, or None."""
    xp = array_namespace(parameter)
    shape = tuple(parameter.shape)
    options = {"dtype": accumulation_dtype(xp, parameter.dtype), "device": device(parameter)}
    if len(shape) < 2:
        return None, None, xp.zeros(shape, **options)
    return xp.zeros((*shape[:-1], 1), **options), xp.zeros((*shape[:-2], 1, shape[-1]), **options), None
