"""Activations on CuPy equal the portable definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.ops._cupy.cuda_cases import DTYPES, LAYOUTS, normal
from tests.reference import for_each
from xformer import vjp
from xformer.backends import resolve, to_host
from xformer.ops import gelu, relu

SHAPES = [(3, 5, 7), (1,), (), (0, 4), (2, 3000), (64,)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestShapes:
    def test_relu(self, cuda, dtype, shape):
        assert cuda.served("relu", cuda.array(normal(*shape), dtype))
        cuda.agree(relu, normal(*shape), dtype=dtype)

    def test_gelu(self, cuda, dtype, shape):
        assert cuda.served("gelu", cuda.array(normal(*shape), dtype))
        cuda.agree(gelu, 3.0 * normal(*shape), dtype=dtype)


@for_each("layout", LAYOUTS)
@for_each("function", [relu, gelu])
@for_each("dtype", ["float32", "bfloat16"])
def test_layouts(cuda, layout, function, dtype):
    cuda.agree(function, normal(6, 16), dtype=dtype, layout=LAYOUTS[layout])


def test_more_than_2_to_the_31_elements(cuda):
    """On a GPU; on the host a few."""
    x = -cuda.xp.ones(100 if cuda.launcher else 2**31 + 100, dtype=cuda.xp.dtype_named("bfloat16"))
    x[-3] = 2.0
    y, pull = vjp(relu, x)
    for got, expected in ((y, [0.0, 2.0, 0.0, 0.0]), (pull(x)[0], [0.0, 2.0, 0.0, 0.0])):
        np.testing.assert_array_equal(to_host(got[-4:]), expected)
        assert not bool(cuda.xp.any(got[:-4] != 0))


@for_each("dtype", DTYPES)
def test_infinities_and_nan(cuda, dtype):
    x = cuda.array([1.0, -2.0, np.nan, np.inf, -np.inf, -0.0], dtype)
    np.testing.assert_array_equal(to_host(relu(x)), [1.0, 0.0, np.nan, np.inf, 0.0, 0.0])
    np.testing.assert_array_equal(to_host(gelu(x))[2:], [np.nan, np.inf, 0.0, 0.0])
    (slope,) = vjp(gelu, x)[1](cuda.xp.ones_like(x))
    np.testing.assert_array_equal(to_host(slope)[2:], [np.nan, 1.0, 0.0, 0.5])


@for_each("dtype", ["float16", "bfloat16"])
def test_gelu_of_all_numbers_of_16_bits(cuda, dtype):
    """Rounded once, down to where the result is -1e-6; the derivative is near 0.5 and 1, or small."""
    with np.errstate(invalid="ignore"):  # of NaN
        x = np.arange(2**16, dtype=np.uint16).view(resolve("numpy").dtype_named(dtype)).astype(float)
    x = x[(x > -5.5) & (x < 1e4)]
    tail = np.asarray([math.erfc(-value / math.sqrt(2.0)) / 2.0 for value in x])
    got, pull = vjp(gelu, cuda.array(x, dtype))
    rounding = 2.0 ** (-8 if dtype == "bfloat16" else -10)
    np.testing.assert_allclose(to_host(got).astype(float), x * tail, rtol=rounding, atol=1e-7)
    slope = to_host(pull(cuda.xp.ones_like(got))[0]).astype(float)
    np.testing.assert_allclose(
        slope, tail + x * np.exp(-x * x / 2.0) / math.sqrt(2.0 * math.pi), rtol=rounding, atol=1e-6
    )
