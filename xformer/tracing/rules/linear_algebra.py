"""Derivatives of products of matrices and vectors."""

from __future__ import annotations

import math
from typing import Any

from xformer.tracing.rule import decomposition, defvjp


def _rows(xp: Any, x: Any) -> Any:
    """View (..., n) as a matrix (rows, n)."""
    return xp.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))


def _matmul_first(xp: Any, g: Any, a_shape: Any, b: Any) -> Any:
    if b.ndim == 1:  # (..., n) @ (n,) -> (...)
        return xp.expand_dims(g, axis=-1) * b
    if len(a_shape) == 1:  # (n,) @ (..., n, m) -> (..., m)
        return xp.matmul(b, xp.expand_dims(g, axis=-1))[..., 0]
    return xp.matmul(g, xp.matrix_transpose(b))


def _matmul_second(xp: Any, g: Any, a: Any, b_shape: Any) -> Any:
    if a.ndim == 1:
        if len(b_shape) == 1:
            return g * a
        return xp.expand_dims(a, axis=-1) * xp.expand_dims(g, axis=-2)
    if len(b_shape) == 1:
        return xp.matmul(xp.matrix_transpose(a), xp.expand_dims(g, axis=-1))[..., 0]
    if len(b_shape) == 2 and a.ndim > 2:
        # One product of flattened rows instead of a stack of products that would be summed afterwards.
        return xp.matmul(xp.matrix_transpose(_rows(xp, a)), _rows(xp, g))
    return xp.matmul(xp.matrix_transpose(a), g)


defvjp("matmul", _matmul_first, _matmul_second)
defvjp(
    "vecdot",
    lambda xp, g, b, *, axis=-1: xp.expand_dims(g, axis=axis) * b,
    lambda xp, g, a, *, axis=-1: xp.expand_dims(g, axis=axis) * a,
)


@decomposition("tensordot")
def _tensordot(xp: Any, x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
    """Decompose tensordot into one matmul of reshaped operands."""
    if isinstance(axes, int):
        axes = (tuple(range(x1.ndim - axes, x1.ndim)), tuple(range(axes)))
    first, second = (tuple(a % x.ndim for a in group) for group, x in zip(axes, (x1, x2), strict=True))
    free1 = tuple(i for i in range(x1.ndim) if i not in first)
    free2 = tuple(i for i in range(x2.ndim) if i not in second)
    count = math.prod(x1.shape[i] for i in first)
    shape1, shape2 = tuple(x1.shape[i] for i in free1), tuple(x2.shape[i] for i in free2)
    left = xp.reshape(xp.permute_dims(x1, (*free1, *first)), (math.prod(shape1), count))
    right = xp.reshape(xp.permute_dims(x2, (*second, *free2)), (count, math.prod(shape2)))
    return xp.reshape(left @ right, (*shape1, *shape2))
