"""One update of stochastic gradient descent with momentum (Polyak, 1964; Sutskever et al., 2013)."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.namespace import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import Operation


def _forward(
    parameter: Array,
    gradient: Array,
    velocity: Array | None,
    *,
    learning_rate: float,
    momentum: float,
    nesterov: bool,
    save: bool,
) -> tuple[Any, Any]:
    xp = array_namespace(parameter, gradient)
    wide = accumulation_dtype(xp, parameter.dtype)
    change = xp.astype(gradient, wide, copy=False)
    if velocity is not None:
        velocity = momentum * velocity + change
        change = change + momentum * velocity if nesterov else velocity
    updated = xp.astype(parameter, wide, copy=False) - learning_rate * change
    return (xp.astype(updated, parameter.dtype, copy=False), velocity), None


_operation = Operation(Implementation("sgd", _forward, vjp=None))


def sgd(
    parameter: Array,
    gradient: Array,
    velocity: Array | None,
    *,
    learning_rate: float,
    momentum: float = 0.0,
    nesterov: bool = False,
) -> tuple[Array, Array | None]:
    """Return the updated (parameter, velocity), both of the parameter's shape; without a velocity, no momentum.

    The velocity becomes momentum * velocity + gradient, and the parameter follows it; with `nesterov`, it follows
    where the velocity is going to be. The arrays given may be overwritten: use only what is returned.
    """
    result: tuple[Array, Array | None] = _operation(
        parameter, gradient, velocity, learning_rate=learning_rate, momentum=momentum, nesterov=nesterov
    )
    return result
