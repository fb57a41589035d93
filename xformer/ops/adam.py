"""One update of Adam (Kingma and Ba, 2015, algorithm 1), or of AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.ops.factor import times, unless_nan
from xformer.ops.operation import Operation

Row = tuple[Array, Array, Array, Array]  # parameter, gradient, first and second moment


def rows(arrays: Sequence[Array]) -> Iterator[Row]:
    """The rows of what the operation is given after the factor: all arrays one after the other."""
    return zip(*[iter(arrays)] * 4, strict=True)


def updated(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """What an update in place returns: of each row all but the gradient."""
    return tuple(array for parameter, _, *moments in rows(arrays) for array in (parameter, *moments))


def _forward(
    factor: Array | None,
    *arrays: Array,
    step_size: float,
    beta1: float,
    beta2: float,
    second_scale: float,
    epsilon: float,
    keep: Sequence[float],
    save: bool,
) -> tuple[Any, Any]:
    xp = array_namespace(*arrays)
    results: list[Array] = []
    for (parameter, gradient, *moments), kept in zip(rows(arrays), keep, strict=True):
        g = times(xp.astype(gradient, moments[0].dtype, copy=False), factor)
        first = beta1 * moments[0] + (1.0 - beta1) * g
        second = beta2 * moments[1] + (1.0 - beta2) * (g * g)
        change = step_size * first / (xp.sqrt(second * second_scale) + epsilon)
        changed = kept * xp.astype(parameter, first.dtype, copy=False) - change
        new = xp.astype(changed, parameter.dtype, copy=False), first, second
        results += (unless_nan(factor, *each) for each in zip((parameter, *moments), new, strict=True))
    return tuple(results), None


_operation = Operation(Implementation("adam", _forward, vjp=None))


def adam(
    parameters: Sequence[Row],
    *,
    learning_rate: float,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: Sequence[float] | None = None,
    factor: Array | None = None,
) -> list[tuple[Array, Array, Array]]:
    """Update parameters: rows (parameter, gradient, first moment, second moment), the arrays of a row of one shape.

    Returns a row (parameter, first moment, second moment) for each. step counts from 1, for the bias correction;
    weight_decay, a number for each, first shrinks the parameter by learning_rate * weight_decay of itself, apart from
    the moments (AdamW); factor: of the gradients, as ops/factor.py has it. The arrays given may be overwritten: a
    kernel may update them in place, so use only what is returned. One row that a kernel cannot serve sends all of them
    to the portable code.
    """
    if not parameters:
        return []
    results = _operation(
        factor,
        *(array for row in parameters for array in row),
        step_size=learning_rate / (1.0 - beta1**step),
        beta1=beta1,
        beta2=beta2,
        second_scale=1.0 / (1.0 - beta2**step),
        epsilon=epsilon,
        keep=tuple(1.0 - learning_rate * decay for decay in weight_decay or [0.0] * len(parameters)),
    )
    return list(zip(*[iter(results)] * 3, strict=True))


def zero_moment(parameter: Array) -> Array:
    """A moment to start from: zeros, in float32 or wider."""
    xp = array_namespace(parameter)
    return xp.zeros_like(parameter, dtype=accumulation_dtype(xp, parameter.dtype))
