"""One update of Adam (Kingma and Ba, 2015, algorithm 1) or AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.ops.grad_scale import cast_number, scale_gradient, skip_if_nonfinite
from xformer.ops.operation import Operation

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


def forward(
    grad_scale: Array | None,
    *arrays: Array,
    settings: Settings,
    weight_decay: Sequence[float],
    donate: bool,
    save: bool,
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


_operation = Operation(
    "adam",
    "grad_scale?: () real, {parameter: (...) float, gradient: (...) float, exp_avg: (...) float, "
    "exp_avg_sq: (...) float[0, inf)}* -> (...)",
    forward,
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
        grad_scale: Scale of the gradients (see ops/grad_scale.py).
        donate: Let kernels write the results into the arrays of the slots; use only the returned arrays then.

    Returns:
        For each slot (parameter, exp_avg, exp_avg_sq).
    """
    if not parameters:
        return []
    results = _operation(
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
