"""Functions that Transformers need and the Array API standard lacks: `erf`, `scatter_add` and `top_k`.

Each is looked up by library, with a fallback in pure standard functions. A namespace under differentiation serves
them like any other function (see autodiff/namespace.py), so `extra.erf(x)` works on traced arrays too; only `top_k`,
which decoding alone needs, is not differentiated.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

from xformer.backends import (
    Array,
    Namespace,
    accumulation_dtype,
    array_namespace,
    backend_name,
    is_host_accessible,
    trace_level,
)
from xformer.errors import ShapeError


def erf(x: Array) -> Array:
    """The error function, elementwise (for the exact GELU; Hendrycks and Gimpel, 2016)."""
    return lookup(array_namespace(x), "erf")(x)


def scatter_add(target: Array, indices: Array, updates: Array) -> Array:
    """Return `target` with `updates[i]` added to row `indices[i]`; repeated rows accumulate.

    target: (rows, ...); indices: (n,) integers in [0, rows); updates: (n, ...). `target` itself is not changed.
    """
    return lookup(array_namespace(target, updates), "scatter_add")(target, indices, updates)


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """The k largest values along the last axis and their indices, largest first; of equal ones, lower indices first.

    x: (..., n), plain (not under differentiation) and free of NaN. Returns two arrays (..., k).

    Raises ShapeError unless 1 <= k <= n.
    """
    if not x.shape or not 1 <= k <= x.shape[-1]:
        raise ShapeError(f"k is {k} for shape {tuple(x.shape)}; expected 1 to the size of the last axis")
    return lookup(array_namespace(x), "top_k")(x, k)  # type: ignore[no-any-return]


def cast_like(y: Array, x: Array) -> Array:
    """y in the dtype of x, which it was made of: to NumPy and CuPy, a bfloat16 times a number is a float32."""
    return y if y.dtype == x.dtype else array_namespace(y).astype(y, x.dtype)


def lookup(xp: Namespace, name: str) -> Callable[..., Any]:
    """Find a gap function for a namespace: a trace's own, the library's, or the portable one."""
    if trace_level(xp):
        return getattr(xp, name)  # type: ignore[no-any-return]
    return _BY_LIBRARY.get((backend_name(xp), name)) or _PORTABLE[name]


def _rounded_once(compute: Callable[..., Array]) -> Callable[..., Array]:
    """Widen float16 and bfloat16 to float32 first, and round once, at the end."""

    @functools.wraps(compute)
    def call(*arrays: Array) -> Array:
        xp, dtype = array_namespace(arrays[0]), arrays[0].dtype
        wide = accumulation_dtype(xp, dtype)
        if wide == dtype:
            return compute(*arrays)
        return xp.astype(compute(*(xp.astype(a, wide) if a.dtype == dtype else a for a in arrays)), dtype)

    return call


# --- erf ---------------------------------------------------------------------------------------------------------

_ERF_TERMS = 34  # enough Taylor and continued-fraction terms for float64 on either side of |x| = 2.2


def _erf_portable(x: Array) -> Array:
    """erf from its Maclaurin series near zero and its continued fraction far out, both to float64 rounding."""
    xp = array_namespace(x)
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


@functools.cache
def _erf_on_the_host() -> Callable[[Array], Array]:
    """SciPy's erf where SciPy is installed: it takes a tenth of the time."""
    if importlib.util.find_spec("scipy") is None:
        return _erf_portable
    return importlib.import_module("scipy.special").erf  # type: ignore[no-any-return]


def _erf_numpy(x: Array) -> Array:
    return _erf_on_the_host()(x)


def _erf_cupy(x: Array) -> Array:
    return importlib.import_module("cupyx.scipy.special").erf(x)


# --- scatter_add -------------------------------------------------------------------------------------------------

_ONE_HOT_ROWS = 512  # the fallback multiplies by a one-hot matrix, this many updates at a time


def _scatter_add_portable(target: Array, indices: Array, updates: Array) -> Array:
    """Multiply by a one-hot matrix: the only way in the bare standard that accumulates repeated rows."""
    xp = array_namespace(target, updates)
    rows = target.shape[0]
    flat = xp.reshape(updates, (updates.shape[0], math.prod(updates.shape[1:])))
    every = xp.arange(rows, dtype=indices.dtype, device=indices.device)
    total = xp.reshape(target, (rows, flat.shape[1]))
    for start in range(0, flat.shape[0], _ONE_HOT_ROWS):
        part = slice(start, min(start + _ONE_HOT_ROWS, flat.shape[0]))
        hit = xp.expand_dims(every, axis=1) == xp.expand_dims(indices[part], axis=0)
        total = total + xp.astype(hit, flat.dtype) @ flat[part, :]
    return xp.reshape(total, target.shape)


def _scatter_add_numpy(target: Array, indices: Array, updates: Array) -> Array:
    numpy = importlib.import_module("numpy")
    result = target.copy()
    numpy.add.at(result, indices, updates)
    return result


def _scatter_add_sorted(target: Array, indices: Array, updates: Array) -> Array:
    """Sort the updates by row and add those of a row as a tree. CuPy's own, by atomics, adds them as they come."""
    xp, count, result = array_namespace(target, updates), indices.shape[0], target.copy()
    if 0 in (count, *target.shape):
        return result
    order = xp.argsort(indices, stable=True)
    rows = xp.take(indices, order, axis=0)
    sums = xp.take(xp.reshape(updates, (count, math.prod(updates.shape[1:]))), order, axis=0)
    distance = 1
    while distance < count:  # each is by now the sum of the last `distance` updates of its row, itself included
        same = xp.expand_dims(rows[distance:] == rows[:-distance], axis=1)
        later = sums[distance:]
        later += xp.where(same, sums[:-distance], 0)
        distance *= 2
    # The last of each row is its total. Every update of a row writes it: no two that write to one place differ.
    totals = xp.take(sums, xp.searchsorted(rows, rows, side="right") - 1, axis=0)
    result[rows] += xp.reshape(totals, updates.shape)
    return result


def _scatter_add_torch(target: Array, indices: Array, updates: Array) -> Array:
    return target.index_add(0, indices, updates)


def _scatter_add_jax(target: Array, indices: Array, updates: Array) -> Array:
    return target.at[indices].add(updates)


def _erf_torch(x: Array) -> Array:
    return importlib.import_module("torch").erf(x)


def _erf_jax(x: Array) -> Array:
    return importlib.import_module("jax.scipy.special").erf(x)


# --- top_k -------------------------------------------------------------------------------------------------------


def _top_k_portable(x: Array, k: int) -> tuple[Array, Array]:
    """Sort everything. CuPy does it this way too: its argpartition is a full sort (array-api issue 629)."""
    xp = array_namespace(x)
    indices = xp.argsort(x, axis=-1, descending=True, stable=True)[..., :k]
    return xp.take_along_axis(x, indices, axis=-1), indices


_FOLD = 64  # values in a group; argpartition is slow, and the largest of each group tells where it need not look


def _top_k_numpy(x: Array, k: int) -> tuple[Array, Array]:
    """Part off the k largest, then sort those. They are in the k groups that have the largest maxima."""
    numpy = importlib.import_module("numpy")
    size, groups = x.shape[-1], x.shape[-1] // _FOLD
    if k == size:
        return _top_k_portable(x, k)
    if groups < 4 * k:
        indices = numpy.argpartition(x, size - k, axis=-1)[..., -k:]
    else:
        maxima = numpy.max(x[..., : groups * _FOLD].reshape(*x.shape[:-1], _FOLD, groups), axis=-2)
        best = numpy.argpartition(maxima, groups - k, axis=-1)[..., -k:]
        inside = best[..., None, :] + groups * numpy.arange(_FOLD)[:, None]  # (..., _FOLD, k) indices
        rest = numpy.arange(groups * _FOLD, size)
        shape = x.shape[:-1]
        places = numpy.concatenate(
            [inside.reshape(*shape, _FOLD * k), numpy.broadcast_to(rest, (*shape, rest.size))], axis=-1
        )
        found = numpy.argpartition(numpy.take_along_axis(x, places, axis=-1), places.shape[-1] - k, axis=-1)
        indices = numpy.take_along_axis(places, found[..., -k:], axis=-1)
    indices = numpy.sort(indices, axis=-1)
    values = numpy.take_along_axis(x, indices, axis=-1)
    if _is_tied(x, values, k):
        return _top_k_portable(x, k)
    values, order = _top_k_portable(values, k)
    return values, numpy.take_along_axis(indices, order, axis=-1)


def _top_k_torch(x: Array, k: int) -> tuple[Array, Array]:
    """torch.topk leaves the order of equal values open, so where there are some, and on a GPU, everything is sorted."""
    torch = importlib.import_module("torch")
    if k == x.shape[-1] or not is_host_accessible(x):
        values, indices = torch.sort(x, dim=-1, descending=True, stable=True)
        return values[..., :k], indices[..., :k]
    values, indices = torch.topk(x, k, dim=-1, sorted=True)
    if _is_tied(x, values, k) or bool((values[..., 1:] == values[..., :-1]).any()):
        return _top_k_portable(x, k)
    return values, indices


def _top_k_jax(x: Array, k: int) -> tuple[Array, Array]:
    return importlib.import_module("jax").lax.top_k(x, k)  # type: ignore[no-any-return]


def _is_tied(x: Array, values: Array, k: int) -> bool:
    """Whether a value outside the k largest equals one of them; it would be a matter of taste which one is in."""
    xp = array_namespace(x)
    return bool(xp.any(xp.count_nonzero(x >= xp.min(values, axis=-1, keepdims=True), axis=-1) > k))


_PORTABLE: dict[str, Callable[..., Any]] = {
    "erf": _rounded_once(_erf_portable),
    "scatter_add": _rounded_once(_scatter_add_portable),
    "top_k": _top_k_portable,
}
_BY_LIBRARY: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy", "erf"): _rounded_once(_erf_numpy),
    ("cupy", "erf"): _rounded_once(_erf_cupy),
    ("torch", "erf"): _erf_torch,
    ("jax", "erf"): _erf_jax,
    ("numpy", "scatter_add"): _rounded_once(_scatter_add_numpy),
    ("cupy", "scatter_add"): _rounded_once(_scatter_add_sorted),
    ("torch", "scatter_add"): _rounded_once(_scatter_add_torch),
    ("jax", "scatter_add"): _rounded_once(_scatter_add_jax),
    ("numpy", "top_k"): _top_k_numpy,
    ("torch", "top_k"): _top_k_torch,
    ("jax", "top_k"): _top_k_jax,
}
NAMES = ("erf", "scatter_add")  # those with derivatives
