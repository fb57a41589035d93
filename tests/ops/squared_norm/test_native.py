"""The squared norm of the native library: values and derivatives equal those of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.native_cases import SIZES, SPECIAL, assert_selected, kernels, needs_library, single  # noqa: F401
from tests.ops.numpy_cases import LAYOUTS, assert_same, with_layout
from xformer.kernels import native as kernel
from xformer.ops import squared_norm

pytestmark = needs_library


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(monkeypatch, layout):
    x = with_layout(layout, "float32")
    assert_selected("squared_norm", x)
    assert_same(monkeypatch, squared_norm, x)
    assert_same(monkeypatch, squared_norm, x, single(3))


@pytest.mark.parametrize("count", [1, 11, 12, 40])
def test_many_arrays(count):
    sizes = [[*SIZES, 0, kernel._BLOCK, 3 * kernel._BLOCK + 1][i % (len(SIZES) + 3)] for i in range(count)]
    arrays = [single(size, seed=size) for size in sizes] + [single(0, 3).T, single(5, 4).T]
    expected = sum((x.astype("float64") ** 2).sum() for x in arrays)
    np.testing.assert_allclose(squared_norm(*arrays), expected, rtol=3e-7)


@pytest.mark.parametrize("special", SPECIAL)
def test_special_values(special):
    x = single(70)
    x[69] = special
    np.testing.assert_array_equal(squared_norm(single(20), x), np.square(np.float32(special)))


def test_squares_that_overflow_are_infinite():
    assert squared_norm(np.full(3, 1e30, "float32")) == np.inf
