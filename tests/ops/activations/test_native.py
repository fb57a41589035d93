"""Activation functions of the native library: values and derivatives equal those of the definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.ops.native_cases import SIZES, assert_precise, assert_selected, kernels, needs_library, single  # noqa: F401
from tests.ops.numpy_cases import LAYOUTS, assert_same, with_layout
from tests.reference import for_each
from xformer import ops, vjp
from xformer.ops import gelu, gelu_tanh, relu, silu

pytestmark = needs_library
FUNCTIONS = [relu, gelu, gelu_tanh, silu]


def definition(x):
    """Return GELU and its derivative, computed by math.erfc in float64."""
    tail = np.asarray([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x.ravel().tolist()]).reshape(x.shape)
    wide = x.astype("float64")
    return wide * tail, tail + wide * np.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(monkeypatch, layout, function):
    x = with_layout(layout, "float32")
    assert_selected(function.__name__, x)
    assert_same(monkeypatch, function, x)


@for_each("function", FUNCTIONS)
def test_sizes(function):
    for shape in [(), (0,), (3, 0), *((size,) for size in SIZES), (3, 70_001)]:
        assert_precise(function, single(*shape))
    assert_precise(function, single(0, 5).T)


@for_each("function", FUNCTIONS)
def test_a_strided_cotangent(function):
    assert_precise(function, single(5, 7), g=single(7, 10)[:, ::2].T)


def test_gelu_has_the_precision_of_float32():
    x = np.linspace(-16.0, 16.0, 99_991).astype("float32")
    expected, slope = definition(x)
    output, pull = vjp(gelu, x)
    np.testing.assert_allclose(output, expected, rtol=0.0, atol=4e-7)
    np.testing.assert_allclose(pull(np.ones_like(x))[0], slope, rtol=0.0, atol=4e-7)
    tails = (x > -12.0) & (x < -0.01)
    np.testing.assert_allclose(output[tails], expected[tails], rtol=1e-5)


@for_each("function", [gelu_tanh, silu])
def test_logistic_units_have_the_precision_of_float32(function):
    x = np.concatenate([np.linspace(-20.0, 20.0, 4001), [-1e4, 1e4, 0.0]]).astype(np.float32)
    output, pull = vjp(function, x)
    expected, expected_pull = vjp(function, x.astype(np.float64))
    np.testing.assert_allclose(output, expected, rtol=4e-6, atol=1e-7)
    np.testing.assert_allclose(pull(np.ones_like(x))[0], expected_pull(np.ones(x.shape))[0], rtol=4e-6, atol=1e-6)


@for_each("function", FUNCTIONS)
def test_special_values(function):
    x = np.asarray([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0, 1e-40], np.float32)
    output, pull = vjp(function, x)
    (slope,) = pull(np.ones_like(x))
    np.testing.assert_allclose(output, [np.nan, np.inf, 0.0, 1e30, 0.0, 0.0, 0.0, 0.0], atol=1e-30)
    middle = [0.0] * 3 if function is relu else [0.5] * 3
    expected = [0.0 if function is relu else np.nan, 1.0, 0.0, 1.0, 0.0, *middle]
    np.testing.assert_allclose(slope[:7], expected[:7], atol=1e-6)


def test_relu_drops_cotangents_that_are_not_finite():
    _, pull = vjp(relu, np.asarray([1.0, -1.0, -np.inf], "float32"))
    np.testing.assert_array_equal(pull(np.asarray([np.inf, np.nan, np.inf], "float32"))[0], [np.inf, 0.0, 0.0])


def test_unaligned_arrays_are_refused():
    x = np.zeros(13, "uint8")[1:].view("float32")
    (line,) = (line for line in ops.explain("gelu", x).splitlines() if "native.gelu" in line)
    assert line == "  not native.gelu: an array is not aligned in memory"
