"""Functions that the standard lacks: values of the libraries' own versions and of the portable ones."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import for_each, raises_line
from xformer.backends import Library, dtype_name, extra, from_host, resolve, to_host
from xformer.backends import numpy as numpy_backend
from xformer.backends.cupy import CupyLibrary
from xformer.backends.library import CLASSES
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import ShapeError

POINTS = np.concatenate([np.linspace(-7.0, 7.0, 1001), [2.2, -2.2, 2.199999, 1e-300, 1e300, -1e300, 0.0]])
ERF = np.asarray([math.erf(x) for x in POINTS])


@pytest.fixture(params=["own", "portable"])
def functions(request, monkeypatch):
    """Return a library's functions, or the portable ones for the same library."""
    if request.param == "portable":
        for cls in CLASSES.values():
            for name in extra.NAMES:
                monkeypatch.setattr(cls, name, getattr(Library, name))
    return extra


def test_erf_is_that_of_the_standard_library(xp, functions):
    assert_close(functions.erf(from_host(xp, POINTS)), ERF, xp=xp, tolerance=2e-15)


def test_erf_of_what_is_not_a_number_and_of_infinity(xp, functions):
    values = to_host(functions.erf(from_host(xp, np.asarray([math.nan, math.inf, -math.inf, -0.0]))))
    np.testing.assert_array_equal(values, [math.nan, 1.0, -1.0, -0.0])


@for_each("dtype", ["float16", "bfloat16"])
def test_half_precision_keeps_its_dtype_and_rounds_once(functions, dtype):
    pytest.importorskip("ml_dtypes", reason="NumPy knows bfloat16 through ml_dtypes")
    xp = pytest.importorskip("array_api_compat.numpy")
    x = from_host(xp, np.linspace(-3.0, 3.0, 101), dtype=dtype)
    rows = from_host(xp, np.ones((3000, 1)), dtype=dtype)
    erf, total = functions.erf(x), functions.scatter_add(rows[:2], xp.zeros(3000, dtype=xp.int64), rows)
    exact = [math.erf(value) for value in to_host(x).astype("float64")]
    assert_close(erf, exact, xp=xp, dtype=dtype, tolerance=5e-4 if dtype == "float16" else 4e-3)
    assert dtype_name(total.dtype) == dtype
    # Adding ones one by one stops at 2048 in float16, at 256 in bfloat16.
    assert to_host(total)[0, 0] == pytest.approx(3001, rel=1e-3 if dtype == "float16" else 8e-3)


def test_scatter_add_accumulates_repeated_rows(xp, functions):
    generator = np.random.default_rng(0)
    target, updates = generator.standard_normal((5, 2, 3)), generator.standard_normal((1200, 2, 3))
    indices = generator.integers(0, 4, 1200)
    expected = target.copy()
    for index, update in zip(indices, updates, strict=True):
        expected[index] += update
    original = from_host(xp, target.copy())
    actual = functions.scatter_add(original, from_host(xp, indices), from_host(xp, updates))
    assert_close(actual, expected, xp=xp)
    assert_close(original, target, xp=xp)  # not changed


@pytest.fixture(params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def sorting(request, monkeypatch):
    """Return a library whose scatter_add sorts."""
    monkeypatch.setattr(NumpyLibrary, "scatter_add", CupyLibrary.scatter_add)
    return library_or_skip(request.param)


@for_each("count", [1, 2, 3, 5, 64, 1000])
def test_sorted_sums_are_those_of_add_at(sorting, count):
    generator = np.random.default_rng(count)
    for rows in (1, 2, 7, 2 * count):
        target, updates = generator.standard_normal((rows, 3)), generator.standard_normal((count, 3))
        indices, expected = generator.integers(0, rows, count), target.copy()
        np.add.at(expected, indices, updates)
        result = extra.scatter_add(*(from_host(sorting, array) for array in (target, indices, updates)))
        assert_close(result, expected, xp=sorting)
        full = [(10 * array).astype("int32") for array in (target, updates)]
        counted = extra.scatter_add(*(from_host(sorting, array) for array in (full[0], indices, full[1])))
        np.add.at(full[0], indices, full[1])
        np.testing.assert_array_equal(to_host(counted), full[0])


def test_sorted_sums_have_the_same_bits_every_time_and_whatever_else_is_added(sorting):
    generator = np.random.default_rng(1)
    updates = generator.standard_normal((5000, 4)).astype("float32")
    indices, target = generator.integers(0, 3, 5000), np.zeros((9, 4), "float32")

    def bits(indices, updates):
        arrays = (from_host(sorting, array) for array in (target, indices, updates))
        return to_host(extra.scatter_add(*arrays))[:3].view("int32")

    first = bits(indices, updates)
    for _ in range(3):
        np.testing.assert_array_equal(bits(indices, updates), first)
    np.testing.assert_array_equal(bits(np.insert(indices, 1000, 8), np.insert(updates, 1000, np.inf, axis=0)), first)


def test_numpy_does_without_scipy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    numpy_backend._erf.cache_clear()
    try:
        assert numpy_backend._erf() is None
        np.testing.assert_allclose(extra.erf(POINTS), ERF, atol=2e-15)
    finally:
        numpy_backend._erf.cache_clear()


# --- top_k ------------------------------------------------------------------------------------------------------------


@for_each("k", [1, 3, 4, 6])
@for_each("dtype", ["float32", "int64"])
def test_of_equal_values_top_k_takes_lower_indices_first(xp, functions, k, dtype):
    x = np.asarray([[1, 3, 2, 3, 2, 2], [5, 5, 5, 5, 5, 5], [0, 1, 2, 3, 4, 5]])
    values, indices = functions.top_k(from_host(xp, x, dtype=dtype), k)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :k]
    np.testing.assert_array_equal(to_host(values), np.take_along_axis(x, order, axis=-1))
    np.testing.assert_array_equal(to_host(indices), order)


@for_each("size", [1024, 1100, 4095])
@for_each("distinct", [True, False])
def test_top_k_of_many(xp, functions, size, distinct):
    generator = np.random.default_rng(size)
    x = (
        generator.permuted(np.tile(np.arange(size), (7, 1)), axis=1)
        if distinct
        else generator.integers(0, 99, (7, size))
    )
    values, indices = functions.top_k(from_host(xp, x, dtype="float32"), 4)
    order = np.argsort(-x, axis=-1, kind="stable")[:, :4]
    np.testing.assert_array_equal(to_host(indices), order)
    np.testing.assert_array_equal(to_host(values), np.take_along_axis(x, order, axis=-1))


def test_top_k_of_the_library_is_used_and_its_ties_are_ordered(monkeypatch):
    strict, calls = resolve("array_api_strict"), []

    def own(x, k, /, *, axis=-1):
        indices = strict.flip(strict.argsort(x, axis=axis), axis=axis)[..., :k]  # of equal values the last
        calls.append(k)
        return strict.take_along_axis(x, indices, axis=axis), indices

    monkeypatch.setattr(strict.module, "top_k", own, raising=False)
    for x in ([[3.0, 1.0, 4.0, 2.0], [0.0, 9.0, 8.0, 7.0]], [[1.0, 2.0, 2.0, 2.0], [5.0, 5.0, 1.0, 0.0]]):
        order = np.argsort(-np.asarray(x), axis=-1, kind="stable")[:, :2]
        values, indices = extra.top_k(from_host(strict, x), 2)
        np.testing.assert_array_equal(to_host(indices), order)
        np.testing.assert_array_equal(to_host(values), np.take_along_axis(np.asarray(x), order, axis=-1))
    assert calls == [2, 2]


def test_top_k_ranks_minus_infinity_last(xp, functions):
    x = np.asarray([[-math.inf, 1.0, -math.inf, 0.5]])
    values, indices = functions.top_k(from_host(xp, x), 3)
    np.testing.assert_array_equal(to_host(values), [[1.0, 0.5, -math.inf]])
    np.testing.assert_array_equal(to_host(indices), [[1, 3, 0]])


@for_each("k", [0, 5])
def test_top_k_of_more_than_there_is(k):
    with raises_line(ShapeError, rf"k is {k} for shape \(1, 4\); expected 1 to the size of the last axis"):
        extra.top_k(np.zeros((1, 4)), k)
