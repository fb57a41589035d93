"""Functions that Transformers need and the Array API standard lacks: `erf`, `scatter_add` and `top_k`.

A library has its own version or uses the portable definition, and a trace provides them like any other function, so
`extra.erf(x)` works on traced arrays too. Only `top_k`, which decoding alone needs, is not differentiable.
"""

from __future__ import annotations

from xformer.backends.array_types import Array
from xformer.backends.library import array_namespace
from xformer.errors import ShapeError

NAMES = ("erf", "scatter_add", "top_k")


def erf(x: Array) -> Array:
    """Compute the error function elementwise, as the exact GELU needs it (Hendrycks and Gimpel, 2016).

    Args:
        x: Floating-point array of any shape.
    """
    return array_namespace(x).erf(x)


def scatter_add(target: Array, indices: Array, updates: Array) -> Array:
    """Return a copy of `target` with `updates[i]` added to row `indices[i]`; repeated rows accumulate.

    Args:
        target: Shape (rows, ...).
        indices: Integers in [0, rows), shape (n,).
        updates: Shape (n, ...).
    """
    return array_namespace(target, updates).scatter_add(target, indices, updates)


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """Return the k largest values along the last axis and their indices, largest first.

    Of equal values the one with the lower index comes first.

    Args:
        x: Plain array (not traced) without NaN, shape (..., n).
        k: Number of values, 1 to n.

    Returns:
        Values and indices, each of shape (..., k).

    Raises:
        ShapeError: Unless 1 <= k <= n.
    """
    if not x.shape or not 1 <= k <= x.shape[-1]:
        raise ShapeError(f"k is {k} for shape {tuple(x.shape)}; expected 1 to the size of the last axis")
    return array_namespace(x).top_k(x, k)


def cast_like(y: Array, x: Array) -> Array:
    """Return y in the dtype of x, from which it was computed: NumPy and CuPy promote bfloat16 to float32."""
    return y if y.dtype == x.dtype else array_namespace(y).astype(y, x.dtype)
