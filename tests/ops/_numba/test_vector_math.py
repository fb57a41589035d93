"""Vectorized functions of compiled kernels."""

from __future__ import annotations

import numpy as np
import pytest

numba = pytest.importorskip("numba")

from xformer.ops._numba.vector_math import exp, float_to_sortable_int, sortable_int_to_float  # noqa: E402

SPECIAL = np.asarray([-np.inf, -1e30, -88.0, np.nan], "float32")


def test_the_exponential_has_the_precision_of_float32():
    x = np.concatenate([np.linspace(-87.2, 88.0, 20_001), [0.0, -0.0]]).astype("float32")
    vectorized = numba.vectorize(["float32(float32)"])(exp.py_func)
    np.testing.assert_allclose(vectorized(x), np.exp(x.astype("float64")), rtol=2.4e-7)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(vectorized(SPECIAL), [0.0, 0.0, 0.0, np.nan])


def test_sortable_integers_have_the_order_of_their_floats():
    x = np.asarray([-np.inf, -3.5, -1e-40, 0.0, 1e-40, 2.0, np.inf, np.nan], "float32")
    integers = [float_to_sortable_int(value) for value in x]
    assert integers == sorted(set(integers))
    np.testing.assert_array_equal([sortable_int_to_float(integer) for integer in integers], x)
