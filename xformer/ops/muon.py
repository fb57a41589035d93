"""One update of Muon (Jordan et al., 2024): momentum, made orthogonal by Newton-Schulz iterations.

As in torch.optim.Muon with adjust_lr_fn="match_rms_adamw" (Liu et al., 2025, section 2.2), but in the dtype of the
momentum, where torch iterates in bfloat16.
"""

from __future__ import annotations

import math

from xformer.backends import Array, accumulation_dtype, array_namespace, device
from xformer.environment import env_flag
from xformer.ops.grad_scale import cast_number, scale_gradient, skip_if_nonfinite
from xformer.ops.linear import linear

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
        grad_scale: Scale of the gradient (see ops/grad_scale.py).
        learning_rate: Step size.
        momentum: Decay rate of the running mean; Nesterov's momentum is used.
        weight_decay: Decoupled weight decay, as in AdamW.
        num_iterations: Number of Newton-Schulz iterations.

    Returns:
        The updated (parameter, exp_avg).
    """
    xp = array_namespace(parameter, gradient)
    wide = accumulation_dtype(xp, parameter.dtype)
    g = scale_gradient(xp.astype(gradient, wide, copy=False), grad_scale)
    moved = momentum * exp_avg + (1.0 - momentum) * g
    direction = orthogonalize(momentum * moved + (1.0 - momentum) * g, num_iterations)
    rate = cast_number(learning_rate, moved)
    old = xp.astype(parameter, wide, copy=False)
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
    # NumPy's products are faster, but their bits depend on the processor.
    is_numpy = xp.name == "numpy"
    matmul = linear if is_numpy and not env_flag("XFORMER_BLAS", default=True) else xp.matmul
    first, cubic, quintic = _COEFFICIENTS
    for _ in range(num_iterations):
        gram = matmul(x, xp.matrix_transpose(x))
        x = first * x + matmul(cubic * gram + quintic * matmul(gram, gram), x)
    return xp.matrix_transpose(x) if is_tall else x
