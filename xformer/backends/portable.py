"""`erf`, `scatter_add`, `top_k` and `tensordot` in other functions of the standard, for libraries that lack them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from xformer.backends.array_types import Array, Namespace
from xformer.backends.dtypes import is_half_precision
from xformer.errors import ShapeError

_ERF_TERMS = 34  # enough Taylor and continued-fraction terms for float64 on either side of |x| = 2.2
_ONE_HOT_ROWS = 512  # updates per one-hot matrix of scatter_add


def compute_in_float32(function: Callable[..., Array]) -> Callable[..., Array]:
    """Let a function of a namespace and arrays upcast float16 and bfloat16 to float32, and round the result once."""

    @functools.wraps(function)
    def upcast(xp: Namespace, *arrays: Any) -> Array:
        dtype = arrays[0].dtype
        if not is_half_precision(dtype):
            return function(xp, *arrays)
        wide = [xp.astype(array, xp.float32) if array.dtype == dtype else array for array in arrays]
        return xp.astype(function(xp, *wide), dtype)

    return upcast


@compute_in_float32
def erf(xp: Namespace, x: Array) -> Array:
    """Compute erf by its Maclaurin series near zero and its continued fraction elsewhere, to float64 rounding."""
    size = xp.abs(x)
    near, far = xp.where(size < 2.2, x, 0.0), xp.clip(size, 2.2, 30.0)  # erf(30) is 1
    square = near * near
    # erf(x) = 2/sqrt(pi) exp(-x^2) sum_n 2^n x^(2n+1) / (2n+1)!!, all terms of one sign: no cancellation.
    total = xp.ones_like(near)
    for n in range(_ERF_TERMS, 0, -1):
        total = 1.0 + total * square * (2.0 / (2 * n + 1))
    series = (2.0 / math.sqrt(math.pi)) * near * xp.exp(-square) * total
    # erfc(x) = exp(-x^2)/sqrt(pi) * 1/(x + (1/2)/(x + 1/(x + (3/2)/(x + ...)))).
    fraction = far
    for n in range(2 * _ERF_TERMS, 0, -1):
        fraction = far + (0.5 * n) / fraction
    tail = 1.0 - xp.exp(-far * far) / (math.sqrt(math.pi) * fraction)
    # sign() of NaN is NaN, so NaN passes through; where() keeps the two branches apart without indexing.
    return xp.where(size < 2.2, series, xp.sign(x) * tail)


@compute_in_float32
def scatter_add(xp: Namespace, target: Array, indices: Array, updates: Array) -> Array:
    """Return `target` (rows, ...) with `updates` (n, ...) added to the rows `indices` (n,); repeats accumulate.

    One-hot matrices are the only way in the bare standard that accumulates repeated rows.
    """
    rows = target.shape[0]
    flat = xp.reshape(updates, (updates.shape[0], math.prod(updates.shape[1:])))
    device = getattr(indices, "device", None)  # some libraries name no devices
    all_rows = xp.expand_dims(xp.arange(rows, dtype=indices.dtype, device=device), axis=1)
    total = xp.reshape(target, (rows, flat.shape[1]))
    for start in range(0, flat.shape[0], _ONE_HOT_ROWS):
        part = slice(start, min(start + _ONE_HOT_ROWS, flat.shape[0]))
        one_hot = all_rows == xp.expand_dims(indices[part], axis=0)
        total = total + xp.astype(one_hot, flat.dtype) @ flat[part, :]
    return xp.reshape(total, target.shape)


def top_k(xp: Any, x: Array, k: int) -> tuple[Any, Any]:
    """Return the k largest values and their indices, sorted; of equal values the lower index comes first.

    Everything is sorted, as CuPy's argpartition does it, too, unless the library has the draft's `top_k`.
    """
    has_own = hasattr(xp.module, "top_k") and xp.is_host_accessible(x)
    return ranked(xp, x, xp.module.top_k(x, k, axis=-1)[1]) if has_own else _sorted(xp, x, k)


def ranked(xp: Namespace, x: Array, indices: Array) -> tuple[Any, Any]:
    """Return `top_k` given the indices of k largest values in any order, unless other values equal one of them."""
    k, indices = indices.shape[-1], xp.sort(indices, axis=-1)
    values = xp.take_along_axis(x, indices, axis=-1)
    if is_tied(xp, x, values, k):
        return _sorted(xp, x, k)
    values, order = _sorted(xp, values, k)
    return values, xp.take_along_axis(indices, order, axis=-1)


def _sorted(xp: Namespace, x: Array, k: int) -> tuple[Any, Any]:
    indices = xp.argsort(x, axis=-1, descending=True, stable=True)[..., :k]
    return xp.take_along_axis(x, indices, axis=-1), indices


def is_tied(xp: Namespace, x: Array, top: Array, k: int) -> bool:
    """Return whether a value outside the k largest equals one of them, so that the choice would be arbitrary."""
    return bool(xp.any(xp.count_nonzero(x >= xp.min(top, axis=-1, keepdims=True), axis=-1) > k))


def tensordot(xp: Namespace, x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
    """Compute tensordot by one matmul of reshaped operands."""
    first, second = (range(x1.ndim - axes, x1.ndim), range(axes)) if isinstance(axes, int) else axes
    count, rest = len(second), x1.ndim - len(first)
    x1 = xp.moveaxis(x1, tuple(first), tuple(range(rest, x1.ndim)))
    x2 = xp.moveaxis(x2, tuple(second), tuple(range(count)))
    if (shape := tuple(x1.shape[rest:])) != tuple(x2.shape[:count]):
        raise ShapeError(f"tensordot got shapes that differ in the axes {axes}: {shape} and {tuple(x2.shape[:count])}")
    shapes = (x1.shape[:rest], shape), (shape, x2.shape[count:])
    left, right = (xp.reshape(x, tuple(map(math.prod, each))) for x, each in zip((x1, x2), shapes, strict=True))
    return xp.reshape(xp.matmul(left, right), (*x1.shape[:rest], *x2.shape[count:]))
