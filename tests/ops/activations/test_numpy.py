"""GELU on NumPy: the polynomial has the precision of float32."""

from __future__ import annotations

import math

import numpy as np
import pytest

from xformer import grad, ops, vjp
from xformer.ops import gelu
from xformer.ops.activations import numpy as numpy_gelu

pytestmark = pytest.mark.usefixtures("no_native")


def definition(x):
    """Return GELU and its derivative, computed by math.erfc in float64."""
    tail = np.asarray([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x.ravel().tolist()]).reshape(x.shape)
    wide = x.astype("float64")
    return wide * tail, tail + wide * np.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)


@pytest.mark.parametrize(
    "x",
    [
        np.linspace(-16.0, 16.0, 3 * numpy_gelu._BLOCK + 5),
        np.zeros((0, 4)),
        np.asarray(0.7),
        np.random.default_rng(0).normal(size=(3, 5, 14))[..., ::2],
        np.random.default_rng(0).normal(size=(5, 7)).T,
    ],
    ids=["several blocks", "empty", "no axes", "every other", "transposed"],
)
def test_values_and_derivatives_are_those_of_the_definition(x):
    x = x.astype("float32")
    x.flags.writeable = False
    output, pull = vjp(gelu, x)
    g = np.cos(np.arange(x.size, dtype="float32")).reshape(x.shape)
    g.flags.writeable = False
    expected, slope = definition(x)
    for actual, desired in ((output, expected), (gelu(x), expected), (pull(g)[0], g * slope)):
        assert actual.dtype == np.float32
        assert actual.shape == x.shape
        np.testing.assert_allclose(actual, desired, rtol=0.0, atol=4e-7)


def test_small_tails_are_precise():
    x = np.linspace(-12.0, -0.01, 999).astype("float32")
    np.testing.assert_allclose(gelu(x), definition(x)[0], rtol=1e-5)


def test_infinity_and_nan():
    x = np.asarray([math.inf, -math.inf, math.nan, 0.0], dtype="float32")
    np.testing.assert_array_equal(gelu(x), [math.inf, 0.0, math.nan, 0.0])
    np.testing.assert_allclose(vjp(gelu, x)[1](np.ones_like(x))[0], [1.0, 0.0, math.nan, 0.5], atol=1e-7)


def test_only_float32_is_supported():
    assert ops.explain("gelu", np.ones(3, "float32")).startswith("gelu on numpy: numpy.gelu\n")
    assert "dtype float64 (the kernel takes float32)" in ops.explain("gelu", np.ones(3))


def test_second_derivatives_come_from_the_definition():
    def slope(x):
        return grad(lambda y: gelu(y))(x)

    x = np.float32(0.3)
    expected = math.exp(-0.045) / math.sqrt(2.0 * math.pi) * (2.0 - 0.09)
    assert float(grad(slope)(np.asarray(x))) == pytest.approx(expected, rel=1e-5)
