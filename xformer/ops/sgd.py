"""One update of stochastic gradient descent with momentum (Polyak, 1964; Sutskever et al., 2013)."""

from __future__ import annotations

from xformer.backends import Array, accumulation_dtype, array_namespace
from xformer.ops.grad_scale import cast_number, scale_gradient, skip_if_nonfinite


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
        grad_scale: Scale of the gradient (see ops/grad_scale.py).
        learning_rate: Step size.
        momentum: Decay rate of the velocity.
        nesterov: Look ahead along the velocity, as Sutskever et al. do.

    Returns:
        The updated (parameter, velocity).
    """
    xp = array_namespace(parameter, gradient)
    wide = accumulation_dtype(xp, parameter.dtype)
    change = scale_gradient(xp.astype(gradient, wide, copy=False), grad_scale)
    if velocity is not None:
        moved = momentum * velocity + change
        change = change + momentum * moved if nesterov else moved
        velocity = skip_if_nonfinite(grad_scale, velocity, moved)
    updated = xp.astype(
        xp.astype(parameter, wide, copy=False) - cast_number(learning_rate, change) * change,
        parameter.dtype,
        copy=False,
    )
    return skip_if_nonfinite(grad_scale, parameter, updated), velocity
