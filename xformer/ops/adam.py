"""One update of Adam (Kingma and Ba, 2015, algorithm 1), or of AdamW (Loshchilov and Hutter, 2019, algorithm 2)."""

from __future__ import annotations

from typing import Any

from xformer.autodiff import Implementation
from xformer.namespace import Array, accumulation_dtype, array_namespace
from xformer.ops.operation import Operation


def _forward(
    parameter: Array,
    gradient: Array,
    first: Array,
    second: Array,
    *,
    step_size: float,
    beta1: float,
    beta2: float,
    second_scale: float,
    epsilon: float,
    keep: float,
    save: bool,
) -> tuple[Any, Any]:
    xp = array_namespace(parameter, gradient)
    g = xp.astype(gradient, first.dtype, copy=False)
    first = beta1 * first + (1.0 - beta1) * g
    second = beta2 * second + (1.0 - beta2) * (g * g)
    change = step_size * first / (xp.sqrt(second * second_scale) + epsilon)
    kept = keep * xp.astype(parameter, first.dtype, copy=False)
    return (xp.astype(kept - change, parameter.dtype, copy=False), first, second), None


_operation = Operation(Implementation("adam", _forward, vjp=None))


def adam(
    parameter: Array,
    gradient: Array,
    first: Array,
    second: Array,
    *,
    learning_rate: float,
    step: int,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float = 0.0,
) -> tuple[Array, Array, Array]:
    """Return the updated (parameter, first moment, second moment), all of the parameter's shape.

    step counts from 1, for the bias correction; weight_decay first shrinks the parameter by learning_rate *
    weight_decay of itself, apart from the moments (AdamW). The arrays given may be overwritten: a kernel may update
    them in place, so use only what is returned.
    """
    result: tuple[Array, Array, Array] = _operation(
        parameter,
        gradient,
        first,
        second,
        step_size=learning_rate / (1.0 - beta1**step),
        beta1=beta1,
        beta2=beta2,
        second_scale=1.0 / (1.0 - beta2**step),
        epsilon=epsilon,
        keep=1.0 - learning_rate * weight_decay,
    )
    return result


def zero_moment(parameter: Array) -> Array:
    """A moment to start from: zeros, in float32 or wider."""
    xp = array_namespace(parameter)
    return xp.zeros_like(parameter, dtype=accumulation_dtype(xp, parameter.dtype))
