"""What version 2025.12 of the standard adds: traces have it, and compute what NumPy does."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each
from xformer.backends import array_namespace, from_host, resolve, to_host
from xformer.errors import DifferentiationError

X = np.asarray([[0.5, -1.5, 2.0], [1.0, 0.25, -0.75]])


def written(xp, x, value):
    x = xp.asarray(x, copy=True)
    x[0, ...] = value
    return x


CASES = {
    "tuples": lambda xp, x: xp.broadcast_arrays(x, x[:1, :]),
    "tuples of constants": lambda xp, x: xp.broadcast_arrays(xp.asarray([True, False]), xp.asarray([[True], [False]])),
    "a tuple of grids": lambda xp, x: xp.meshgrid(x[0, :], x[1, :2], indexing="ij"),
    "isin": lambda xp, x: xp.isin(xp.astype(x, xp.int64), xp.asarray([1, -1]), invert=True),
    "isin of a number": lambda xp, x: xp.isin(1, xp.astype(x, xp.int64)),
    "isin in a number": lambda xp, x: xp.isin(xp.astype(x, xp.int64), 1),
    "broadcast_shapes": lambda xp, x: xp.zeros(xp.broadcast_shapes(x.shape, (4, 1, 1)), dtype=x.dtype),
    "axes of expand_dims": lambda xp, x: xp.expand_dims(x, axis=(0, -1)),
    "positional axes of expand_dims": lambda xp, x: xp.expand_dims(x, (2, 0)),
    "no axis of expand_dims": lambda xp, x: xp.expand_dims(x, axis=()),
    "negative axes": lambda xp, x: xp.permute_dims(x[None, ...], (-1, 0, -2)),
    "search of a number": lambda xp, x: xp.searchsorted(xp.sort(x[0, :]), 0.6),
    "search of a scalar": lambda xp, x: xp.searchsorted(xp.asarray([0.0, 1.0], dtype=x.dtype), x[0, 0]),
    "search of a matrix": lambda xp, x: xp.searchsorted(xp.asarray([0.0, 1.0], dtype=x.dtype), x, side="right"),
    "promotion of a number": lambda xp, x: written(xp, x, 2),
    "promotion of an array": lambda xp, x: written(xp, x, xp.astype(x[1, :] * x[1, :], xp.float32)),
}


def as_tuple(value):
    """Return a tuple, which lists are not."""
    return value if isinstance(value, tuple) else (value,)


def smooth(values):
    """Return the sum of the squares of floating arrays, or of zeros."""
    xp = array_namespace(*values)
    arrays = [x * x for x in values if xp.isdtype(x.dtype, "real floating")] or [xp.zeros(1, dtype=xp.float64)]
    return sum(xp.sum(x, dtype=xp.float64) for x in arrays)


@for_each("transform", ["grad", "jvp", "jit", "vmap"])
@for_each("library", ["numpy", "array_api_strict", "torch"])
@for_each("case", CASES)
def test_traces_compute_what_the_standard_says(case, library, transform):
    expected = as_tuple(CASES[case](resolve("numpy"), X))
    if library == "array_api_strict" and case == "isin":
        return  # 2.6.1 ignores invert
    if library == "torch":
        pytest.importorskip("torch")
    x, seen = from_host(resolve(library), X), []

    def function(x):
        values = as_tuple(CASES[case](array_namespace(x), x))
        seen.append([(tuple(value.shape), str(value.dtype).rsplit(".", maxsplit=1)[-1]) for value in values])
        return values if transform in ("jit", "vmap") else smooth(values) + 0.0 * array_namespace(x).sum(x)

    if transform == "grad":
        gradient = xf.grad(function)(x)
        numeric = np.zeros_like(X)
        for index in np.ndindex(*X.shape):
            step = np.zeros_like(X)
            step[index] = 1e-4
            ends = [float(function(from_host(resolve(library), X + sign * step))) for sign in (1, -1)]
            numeric[index] = (ends[0] - ends[1]) / 2e-4
        np.testing.assert_allclose(to_host(gradient), numeric, atol=1e-2 if "of an array" in case else 1e-6)
    elif transform == "jvp":
        value, slope = xf.jvp(function, (x,), (x,))
        np.testing.assert_allclose(to_host(slope), np.sum(to_host(xf.grad(function)(x)) * X), atol=1e-6)
        np.testing.assert_allclose(float(value), float(function(x)), atol=1e-6)
    else:
        batch = array_namespace(x).stack([x]) if transform == "vmap" else x
        values = as_tuple(getattr(xf, transform)(function)(batch))
        for value, reference in zip(values, expected, strict=True):
            np.testing.assert_array_equal(to_host(value[0, ...] if transform == "vmap" else value), reference)
    assert seen[0] == [(each.shape, str(each.dtype)) for each in expected]


@for_each("library", ["numpy", "array_api_strict", "torch", "jax", "mlx"])
def test_top_k_has_derivatives(library):
    xp = resolve(library) if library == "numpy" else pytest.importorskip(library) and resolve(library)
    x = from_host(xp, X.astype("float32"))

    def loss(x):
        values, indices = array_namespace(x).top_k(x, 2)
        assert tuple(indices.shape) == (2, 2)
        return array_namespace(x).sum(values**2)

    np.testing.assert_allclose(to_host(xf.grad(loss)(x)), [[1.0, 0.0, 4.0], [2.0, 0.5, 0.0]])
    np.testing.assert_allclose(to_host(xf.jvp(loss, (x,), (x,))[1]), 10.625)


def test_functions_of_extensions_without_a_derivative_are_absent():
    def function(x):
        linalg = array_namespace(x).linalg
        assert (hasattr(linalg, "eigh"), hasattr(linalg, "eigvals")) == (True, False)
        return array_namespace(x).sum(linalg.eigvals(x))

    with pytest.raises(DifferentiationError, match="eigvals"):
        xf.grad(function)(np.eye(2))
