"""One update of stochastic gradient descent with momentum (Polyak, 1964; Sutskever et al., 2013)."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.ops.factor import times, unless_nan
from xformer.ops.operation import Operation


def _forward(
    parameter: Array,
    gradient: Array,
    velocity: Array | None,
    factor: Array | None,
    *,
    learning_rate: float,
    momentum: float,
    nesterov: bool,
    save: bool,
) -> tuple[Any, Any]:
    xp = array_namespace(parameter, gradient)
    wide = accumulation_dtype(xp, parameter.dtype)
    change = times(xp.astype(gradient, wide, copy=False), factor)
    if velocity is not None:
        moved = momentum * velocity + change
        change = change + momentum * moved if nesterov else moved
        velocity = unless_nan(factor, velocity, moved)
    updated = xp.astype(xp.astype(parameter, wide, copy=False) - learning_rate * change, parameter.dtype, copy=False)
    return (unless_nan(factor, parameter, updated), velocity), None


_operation = Operation(Implementation("sgd", _forward, vjp=None))


def sgd(
    parameter: Array,
    gradient: Array,
    velocity: Array | None,
    factor: Array | None = None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[Array, Array | None]:
    """Return the updated (parameter, velocity), both of the parameter's shape; without a velocity, no momentum.

    The velocity becomes momentum * velocity + gradient, and the parameter follows it; with `nesterov`, it follows
    where the velocity is going to be. factor: of the gradient, as ops/factor.py has it. The arrays given may be
    overwritten: use only what is returned.
    """
    result: tuple[Array, Array | None] = _operation(
        parameter, gradient, velocity, factor, learning_rate=learning_rate, momentum=momentum, nesterov=nesterov
    )
    return result
