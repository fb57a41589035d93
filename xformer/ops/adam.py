"""One update of Adam (Kingma and Ba, 2015, algorithm 1), or of AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from xformer.autodiff import Implementation
from xformer.namespace import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import Operation

Row = tuple[Array, Array, Array, Array]  # parameter, gradient, first and second moment


def rows(arrays: Sequence[Array]) -> Iterator[Row]:
    """The rows of what the operation is given: the factor of the gradients, then all arrays one after the other."""
    return zip(*[iter(arrays[1:])] * 4, strict=True)


def kept(arrays: Sequence[Array]) -> tuple[Array, ...]:
    """Of what the operation is given, what it gives back updated: of each row all but the gradient."""
    return tuple(array for parameter, _, *moments in rows(arrays) for array in (parameter, *moments))


def read_factor(factor: Array | None) -> float | None:
    """The factor on the host, 1 if there is none; None for a NaN, which keeps everything as it is."""
    number = 1.0 if factor is None else float(factor)
    return None if math.isnan(number) else number


def _forward(
    *arrays: Array,
    step_size: float,
    beta1: float,
    beta2: float,
    second_scale: float,
    epsilon: float,
    keep: Sequence[float],
    save: bool,
) -> tuple[Any, Any]:
    xp, factor = array_namespace(*arrays), read_factor(arrays[0])
    if factor is None:
        return kept(arrays), None
    updated: list[Array] = []
    for (parameter, gradient, first, second), remains in zip(rows(arrays), keep, strict=True):
        g = xp.astype(gradient, first.dtype, copy=False)
        g = g if factor == 1.0 else factor * g
        first = beta1 * first + (1.0 - beta1) * g
        second = beta2 * second + (1.0 - beta2) * (g * g)
        change = step_size * first / (xp.sqrt(second * second_scale) + epsilon)
        changed = remains * xp.astype(parameter, first.dtype, copy=False) - change
        updated += xp.astype(changed, parameter.dtype, copy=False), first, second
    return tuple(updated), None


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
    the moments (AdamW). factor: a scalar that the gradients are multiplied by; where it is NaN nothing changes, which a
    GPU can decide without the host. The arrays given may be overwritten: a kernel may update them in place, so use only
    what is returned. One row that a kernel cannot serve sends all of them to the portable code.
    """
    if not parameters:
        return []
    updated = _operation(
        factor,
        *(array for row in parameters for array in row),
        step_size=learning_rate / (1.0 - beta1**step),
        beta1=beta1,
        beta2=beta2,
        second_scale=1.0 / (1.0 - beta2**step),
        epsilon=epsilon,
        keep=tuple(1.0 - learning_rate * decay for decay in weight_decay or [0.0] * len(parameters)),
    )
    return list(zip(*[iter(updated)] * 3, strict=True))


def zero_moment(parameter: Array) -> Array:
    """A moment to start from: zeros, in float32 or wider."""
    xp = array_namespace(parameter)
    return xp.zeros_like(parameter, dtype=accumulation_dtype(xp, parameter.dtype))
