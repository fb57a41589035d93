"""Norms of the native library: values and derivatives equal those of the definitions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.native_cases import (
    SIZES,
    SPECIAL,
    assert_precise,
    assert_selected,
    kernels,  # noqa: F401
    needs_library,
    single,
)
from tests.ops.numpy_cases import LAYOUTS, assert_same, with_layout
from xformer import vjp
from xformer.ops import layer_norm, rms_norm

pytestmark = needs_library


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(monkeypatch, layout):
    x, weight, bias = with_layout(layout, "float32"), single(14, seed=1)[::2], single(7, seed=2)
    assert_selected("layer_norm", x, weight, bias, epsilon=1e-5)
    assert_selected("rms_norm", x, weight, epsilon=1e-5)
    assert_same(monkeypatch, layer_norm, x, weight, bias)
    assert_same(monkeypatch, lambda x, weight: layer_norm(x, weight, None, epsilon=0.1), x, weight)
    assert_same(monkeypatch, lambda bias: layer_norm(x, weight, bias), bias)
    assert_same(monkeypatch, rms_norm, x, weight)


@pytest.mark.parametrize("rows", [0, 1, 3, 700])
def test_sizes(rows):
    for features in SIZES:
        x, weight, bias = single(rows, features), single(features, seed=1), single(features, seed=2)
        assert_precise(lambda x, w, b: layer_norm(x, w, b, epsilon=1e-3), x, weight, bias, tolerance=4e-6)
        assert_precise(lambda x, w: rms_norm(x, w, epsilon=1e-3), x, weight, tolerance=4e-6)


def test_a_large_mean_is_subtracted_first():
    x, ones = single(4, 512) + 1000.0, np.ones(512, "float32")
    assert_precise(lambda x: layer_norm(x, ones, None), x, tolerance=2e-4)


@pytest.mark.parametrize("special", [*SPECIAL, 1e30])
def test_a_special_value_stays_in_its_row(special):
    x = single(3, 21)
    x[1, 20] = special
    ones = np.ones(21, "float32")
    for function in (lambda x: layer_norm(x, ones, ones), lambda x: rms_norm(x, ones)):
        output, pull = vjp(function, x)
        expected, expected_pull = vjp(function, x.astype("float64"))
        (dx,), (expected_dx,) = pull(np.ones_like(x)), expected_pull(np.ones(x.shape))
        np.testing.assert_allclose(output[::2], expected[::2], atol=1e-5)
        np.testing.assert_allclose(dx[::2], expected_dx[::2], atol=1e-5)
        if special != 1e30:  # whose square overflows in float32
            np.testing.assert_array_equal(np.isnan(output), np.isnan(expected))
            np.testing.assert_array_equal(np.isnan(dx), np.isnan(expected_dx))
