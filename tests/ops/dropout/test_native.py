"""Dropout of the native library: values and derivatives equal those of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.native_cases import SIZES, SPECIAL, assert_selected, kernels, needs_library, single  # noqa: F401
from tests.ops.numpy_cases import LAYOUTS, assert_same, with_layout
from xformer.ops import dropout

pytestmark = needs_library


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(monkeypatch, layout):
    x = with_layout(layout, "float32")
    keep = np.random.default_rng(3).random(x.shape) < 0.7
    assert_selected("dropout", x, keep, keep_probability=0.7)
    assert_same(monkeypatch, lambda x: dropout(x, keep, 0.7), x)
    assert_same(monkeypatch, lambda x: dropout(x, keep.T.copy().T, 0.7), x)
    assert_same(monkeypatch, lambda x: dropout(x, keep[..., :1], 0.7), x)  # broadcasts


def test_sizes(monkeypatch):
    for size in [0, *SIZES, 200_003]:
        keep = np.random.default_rng(size).random(size) < 0.7
        assert_same(monkeypatch, lambda x, keep=keep: dropout(x, keep, 0.7), single(size))


@pytest.mark.parametrize("special", SPECIAL)
def test_dropped_elements_are_zero_even_if_not_finite(special):
    x, keep = np.asarray([1.0, -2.0, 3.0, special], "float32"), np.asarray([True, True, False, False])
    np.testing.assert_array_equal(dropout(x, keep, 0.5), [2.0, -4.0, 0.0, 0.0])
    np.testing.assert_array_equal(dropout(x[::-1], keep, 1.0), [special, 3.0, 0.0, 0.0])
    x, keep = np.tile(x, 40), np.tile(keep, 40)  # whole vectors
    np.testing.assert_array_equal(dropout(x, keep, 0.5), np.tile([2.0, -4.0, 0.0, 0.0], 40))
