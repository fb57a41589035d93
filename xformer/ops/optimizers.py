"""Updates of optimizers, and other operations of training on many arrays: the norm of gradients, and casts.

`grad_scale` is the scale of the gradients inside an update: a scalar array, or None for 1; NaN skips the update.
Clipping, unscaling and the check for overflow thus need no host synchronization.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xformer.backends import Array, accumulation_dtype, array_namespace, device
from xformer.ops.operation import Operation
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


def _wide(parameter: Array, gradient: Array, grad_scale: Array | None) -> tuple[Any, Array, Array]:
    """Return the namespace, the parameter in the dtype of the update, float32 or wider, and the scaled gradient."""
    xp = array_namespace(parameter, gradient)
    wide = accumulation_dtype(xp, parameter.dtype)
    p, g = (xp.astype(array, wide, copy=False) for array in (parameter, gradient))
    return xp, p, scale_gradient(g, grad_scale)


# --- Adam (Kingma and Ba, 2015, algorithm 1) and AdamW (Loshchilov and Hutter, 2019, algorithm 2) ---------------------

Slot = tuple[Any, Any, Any, Any]  # parameter, gradient, exp_avg, exp_avg_sq


class Settings(NamedTuple):
    """Numbers of one update; `step_size` contains the bias correction of the mean.

    Of an update that runs as a program of `jit`, step_size, bias_correction2 and learning_rate are scalar arrays.
    """

    step_size: float | Array
    beta1: float
    beta2: float
    bias_correction2: float | Array
    epsilon: float
    learning_rate: float | Array


def slots(arrays: Sequence[Array]) -> Iterator[Slot]:
    """Group the operation's flat arguments (without the gradient scale) into one slot for each parameter."""
    return zip(*[iter(arrays)] * 4, strict=True)


def updated(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Return the results of an update in place: all arrays except the gradients."""
    return tuple([array for index, array in enumerate(arrays) if index % 4 != 1])


def writable(arrays: Sequence[Array], donate: bool) -> Sequence[Array]:
    """Return arrays that a kernel may write to: donated ones themselves, else copies of all except the gradients."""
    if donate:
        return arrays
    copy = array_namespace(*arrays).asarray
    return [array if index % 4 == 1 else copy(array, copy=True) for index, array in enumerate(arrays)]


def adam_forward(
    grad_scale: Any, *arrays: Array, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    """Return new arrays for all except the gradients."""
    xp = array_namespace(*arrays)
    results: list[Array] = []
    for (parameter, gradient, *moments), rate in zip(slots(arrays), weight_decay, strict=True):
        step_size, beta1, beta2, bias_correction2, epsilon, _ = (cast_number(number, moments[0]) for number in settings)
        g = scale_gradient(xp.astype(gradient, moments[0].dtype, copy=False), grad_scale)
        exp_avg = beta1 * moments[0] + (1.0 - beta1) * g
        exp_avg_sq = beta2 * moments[1] + (1.0 - beta2) * (g * g)
        change = step_size * exp_avg / (xp.sqrt(exp_avg_sq * bias_correction2) + epsilon)
        decay = cast_number(1.0 - settings.learning_rate * rate, exp_avg)
        changed = decay * xp.astype(parameter, exp_avg.dtype, copy=False) - change
        new = xp.astype(changed, parameter.dtype, copy=False), exp_avg, exp_avg_sq
        results += (skip_if_nonfinite(grad_scale, *pair) for pair in zip((parameter, *moments), new, strict=True))
    return tuple(results), None


_adam = Operation(
    "adam",
    "grad_scale?: () real, {parameter: (...) float, gradient: (...) float, exp_avg: (...) float, "
    "exp_avg_sq: (...) float[0, inf)}* -> (...)",
    adam_forward,
    vjp=None,
)


def adam(
    parameters: Sequence[Slot],
    *,
    learning_rate: float | Array,
    step: int | Any,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: Sequence[float] | None = None,
    grad_scale: Array | None = None,
    donate: bool = False,
) -> list[tuple[Array, Array, Array]]:
    """Update parameters.

    If a kernel cannot update one of the slots, the portable definition updates all of them.

    Args:
        parameters: Slots (parameter, gradient, exp_avg, exp_avg_sq) of arrays of one shape.
        learning_rate: Step size before the bias correction. A floating scalar array is not read on the host, so that
            a program of `jit` can be run with another value; likewise `step`.
        step: Number of this update, counted from 1, for the bias correction.
        beta1: Decay rate of the mean of the gradients.
        beta2: Decay rate of the mean of the squared gradients.
        epsilon: Added to the denominator.
        weight_decay: One number for each slot; the parameter is first multiplied by 1 - learning_rate * weight_decay,
            independently of the moments (AdamW). Default 0.
        grad_scale: Scale of the gradients.
        donate: Let kernels write the results into the arrays of the slots; use only the returned arrays then.

    Returns:
        For each slot (parameter, exp_avg, exp_avg_sq).
    """
    if not parameters:
        return []
    results = _adam(
        grad_scale,
        *itertools.chain.from_iterable(parameters),
        settings=Settings(
            learning_rate / (1.0 - beta1**step), beta1, beta2, 1.0 / (1.0 - beta2**step), epsilon, learning_rate
        ),
        weight_decay=tuple(weight_decay or [0.0] * len(parameters)),
        donate=donate,
    )
    return list(zip(*[iter(results)] * 3, strict=True))


def zero_moment(parameter: Array) -> Array:
    """Return the initial moment of a parameter: zeros, in float32 or wider."""
    xp = array_namespace(parameter)
    return xp.zeros_like(parameter, dtype=accumulation_dtype(xp, parameter.dtype))


# --- Adafactor (Shazeer and Stern, 2018, algorithms 4 and 5) ----------------------------------------------------------
# As in torch.optim.Adafactor, sums over rows and columns are means, and epsilon bounds the root of the second moment
# from below, where the paper adds it to every squared gradient.


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
        grad_scale: Scale of the gradient.
        step_size: Step size relative to the root mean square of the parameter; absolute if min_scale is None.
        beta2: Decay rate of the mean squared gradients.
        epsilon: Lower bound of the root of the second moment; None is the dtype's precision.
        min_scale: Lower bound of the parameter's root mean square.
        clip_threshold: Updates with a larger root mean square are scaled down to it (section 6 of the paper).
        decay: Factor that weight decay multiplies the parameter by; 1 is none.

    Returns:
        The updated (parameter, row, column, variance).
    """
    xp, p, g = _wide(parameter, gradient, grad_scale)
    old = parameter, row, column, variance
    epsilon = float(xp.finfo(g.dtype).eps) if epsilon is None else epsilon
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


# --- Muon (Jordan et al., 2024): momentum, made orthogonal by Newton-Schulz iterations --------------------------------
# As in torch.optim.Muon with adjust_lr_fn="match_rms_adamw" (Liu et al., 2025, section 2.2), but in the dtype of the
# momentum, where torch iterates in bfloat16.

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5: the iteration moves singular values to about 0.7 to 1.2
_SMALLEST_NORM = 1e-7
_RMS_OF_ADAM = 0.2  # usual root mean square of an update of Adam, divided by the learning rate


def muon(
    parameter: Array,
    gradient: Array,
    exp_avg: Array,
    grad_scale: Array | None = None,
    *,
    learning_rate: float | Array,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    num_iterations: int = 5,
) -> tuple[Array, Array]:
    """Update one matrix.

    The update is as large as one of Adam, so both can share a learning rate.

    Args:
        parameter: Array of shape (rows, columns).
        gradient: Array of the parameter's shape.
        exp_avg: Running mean of the gradients, of the parameter's shape.
        grad_scale: Scale of the gradient.
        learning_rate: Step size.
        momentum: Decay rate of the running mean; Nesterov's momentum is used.
        weight_decay: Decoupled weight decay, as in AdamW.
        num_iterations: Number of Newton-Schulz iterations.

    Returns:
        The updated (parameter, exp_avg).
    """
    xp, old, g = _wide(parameter, gradient, grad_scale)
    moved = momentum * exp_avg + (1.0 - momentum) * g
    direction = orthogonalize(momentum * moved + (1.0 - momentum) * g, num_iterations)
    rate = cast_number(learning_rate, moved)
    size = _RMS_OF_ADAM * math.sqrt(max(parameter.shape))
    new = xp.astype((1.0 - rate * weight_decay) * old - (rate * size) * direction, parameter.dtype, copy=False)
    return skip_if_nonfinite(grad_scale, parameter, new), skip_if_nonfinite(grad_scale, exp_avg, moved)


def orthogonalize(matrix: Array, num_iterations: int = 5) -> Array:
    """Return a matrix with the same singular vectors, and singular values near 1 (those far below the norm stay small).

    Args:
        matrix: Floating array of shape (rows, columns).
        num_iterations: Number of Newton-Schulz iterations.

    Returns:
        Array of the same shape and dtype.
    """
    xp = array_namespace(matrix)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = xp.matrix_transpose(matrix) if is_tall else matrix  # products of the shorter side are smaller
    norm = xp.sqrt(xp.sum(x * x))
    x = x / xp.maximum(norm, xp.full((), _SMALLEST_NORM, dtype=x.dtype, device=device(x)))
    first, cubic, quintic = _COEFFICIENTS
    for _ in range(num_iterations):
        gram = xp.matmul(x, xp.matrix_transpose(x))
        x = first * x + xp.matmul(cubic * gram + quintic * xp.matmul(gram, gram), x)
    return xp.matrix_transpose(x) if is_tall else x


# --- Stochastic gradient descent with momentum (Polyak, 1964; Sutskever et al., 2013) ---------------------------------


def sgd(
    parameter: Array,
    gradient: Array,
    velocity: Array | None,
    grad_scale: Array | None = None,
    *,
    learning_rate: float | Array,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[Array, Array | None]:
    """Update one parameter.

    The velocity becomes momentum * velocity + gradient, and the parameter moves along it.

    Args:
        parameter: Array of any shape.
        gradient: Array of the parameter's shape.
        velocity: Array of the parameter's shape, or None without momentum.
        grad_scale: Scale of the gradient.
        learning_rate: Step size.
        momentum: Decay rate of the velocity.
        nesterov: Look ahead along the velocity, as Sutskever et al. do.

    Returns:
        The updated (parameter, velocity).
    """
    xp, old, change = _wide(parameter, gradient, grad_scale)
    if velocity is not None:
        moved = momentum * velocity + change
        change = change + momentum * moved if nesterov else moved
        velocity = skip_if_nonfinite(grad_scale, velocity, moved)
    new = xp.astype(old - cast_number(learning_rate, change) * change, parameter.dtype, copy=False)
    return skip_if_nonfinite(grad_scale, parameter, new), velocity


# --- the norm of gradients, and casts for mixed precision -------------------------------------------------------------


def _squared_norm_forward(*arrays: Array, save: bool) -> tuple[Array, Any]:
    xp = array_namespace(*arrays)
    wide = (xp.astype(x, accumulation_dtype(xp, x.dtype), copy=False) for x in arrays)
    return xp.sum(xp.stack([xp.sum(x * x, dtype=x.dtype) for x in wide])), arrays


def squared_norm_vjp(g: Array, arrays: Any, needs: Any) -> tuple[Any, ...]:
    """Return the cotangents of all arrays."""
    return tuple(2.0 * g * x for x in arrays)


_squared_norm = Operation("squared_norm", "{x: (...) float}* -> ()", _squared_norm_forward, squared_norm_vjp)


def squared_norm(*arrays: Array) -> Array:
    """Sum the squares of all elements of all arrays: a scalar, in float32 or wider."""
    return _squared_norm(*arrays)


def _cast_forward(*arrays: Array, dtype: str, save: bool) -> tuple[tuple[Array, ...], Any]:
    xp = array_namespace(*arrays)
    target = xp.dtype_named(dtype)
    return tuple(xp.astype(x, target) for x in arrays), None


# The backward pass casts cotangents to the dtypes of their arrays.
_cast = Operation("cast", "{x: (...) float}* -> (...)", _cast_forward, lambda g, residuals, needs, *, dtype: tuple(g))


def cast(*arrays: Array, dtype: str) -> tuple[Array, ...]:
    """Cast arrays to one floating dtype.

    Args:
        *arrays: Floating arrays of any shapes.
        dtype: Name of the dtype, such as "bfloat16".

    Returns:
        New arrays of that dtype.
    """
    return _cast(*arrays, dtype=dtype) if arrays else ()
