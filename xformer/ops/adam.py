"""One update of Adam (Kingma and Ba, 2015, algorithm 1)."""

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
    gradient_scale: float,
    save: bool,
) -> tuple[Any, Any]:
    xp = array_namespace(parameter, gradient)
    g = gradient_scale * xp.astype(gradient, first.dtype, copy=False)
    first = beta1 * first + (1.0 - beta1) * g
    second = beta2 * second + (1.0 - beta2) * (g * g)
    change = step_size * first / (xp.sqrt(second * second_scale) + epsilon)
    return (xp.astype(parameter - change, parameter.dtype, copy=False), first, second), None


def _no_vjp(g: Any, residuals: Any, needs: Any, **static: Any) -> tuple[Any, ...]:
    raise NotImplementedError("adam has no derivative; call optimizers outside the differentiated function")


_operation = Operation(Implementation("adam", _forward, _no_vjp))


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
    gradient_scale: float = 1.0,
) -> tuple[Array, Array, Array]:
    """Return the updated (parameter, first moment, second moment), all of the parameter's shape.

    step counts from 1, for the bias correction; the gradient is multiplied by gradient_scale first. The arrays given
    may be overwritten: a kernel may update them in place, so use only what is returned.
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
        gradient_scale=gradient_scale,
    )
    return result


def zero_moment(parameter: Array) -> Array:
    """A moment to start from: zeros, in float32 or wider."""
    xp = array_namespace(parameter)
    return xp.zeros_like(parameter, dtype=accumulation_dtype(xp, parameter.dtype))
