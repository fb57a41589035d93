"""Normalization on CuPy equals the portable definitions: values and all gradients."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.ops._cupy.cuda_cases import DTYPES, LAYOUTS, normal
from tests.reference import for_each, raises_line
from xformer import ops, vjp
from xformer.backends import to_host
from xformer.errors import ShapeError
from xformer.ops import layer_norm, rms_norm

SHAPES = [(3, 5, 7), (7,), (4, 16), (0, 5, 7), (3, 1), (2, 1029), (2, 1040), (130, 40), (7, 520)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestShapes:
    """Odd lengths, one row, one feature, no rows, several vectors per thread, several warps, several chunks of rows."""

    def test_layer_norm(self, cuda, dtype, shape):
        x, weight, bias = 3.0 + normal(*shape), normal(shape[-1], seed=1), normal(shape[-1], seed=2)
        arrays = [cuda.array(array, dtype) for array in (x, weight, bias)]
        assert cuda.served("layer_norm", *arrays, epsilon=1e-5)
        cuda.agree(layer_norm, x, weight, bias, dtype=dtype)
        cuda.agree(lambda x, weight: layer_norm(x, weight, None, epsilon=0.1), x, weight, dtype=dtype)

    def test_rms_norm(self, cuda, dtype, shape):
        x, weight = normal(*shape), normal(shape[-1], seed=1)
        assert cuda.served("rms_norm", cuda.array(x, dtype), cuda.array(weight, dtype), epsilon=1e-5)
        cuda.agree(rms_norm, x, weight, dtype=dtype)


@for_each("n", [16384, 16392])
def test_rows_that_just_fit_into_registers_and_longer_ones(cuda, n):
    x, weight, bias = normal(2, n), normal(n, seed=1), normal(n, seed=2)
    cuda.agree(layer_norm, x, weight, bias, dtype="bfloat16")


@for_each("layout", LAYOUTS)
@for_each("dtype", ["float32", "bfloat16"])
def test_layouts(cuda, layout, dtype):
    x, weight, bias = normal(6, 16), normal(16, seed=1), normal(16, seed=2)
    cuda.agree(layer_norm, x, weight, bias, dtype=dtype, layout=LAYOUTS[layout])
    cuda.agree(lambda weight, x: layer_norm(x, weight, None), weight, x, dtype=dtype, layout=LAYOUTS[layout])


@for_each("dtype", ["float16", "bfloat16"])
def test_float32_parameters_with_rows_of_16_bits(cuda, dtype):
    x, weight, bias = normal(9, 24), normal(24, seed=1), normal(24, seed=2)
    cuda.agree(layer_norm, x, weight, bias, dtype=(dtype, "float32", "float32"))
    cuda.agree(rms_norm, x, weight, dtype=(dtype, "float32"))


def test_explain_gives_the_reason(cuda):
    x, weight = cuda.array(np.ones((2, 3)), "float32"), cuda.array(np.ones(3), "float16")
    wide, one = cuda.array(np.ones(3), "float64"), cuda.array(np.ones(1), "float32")
    for parameter, reason in [
        (weight, "parameters of dtype float16 with float32 rows"),
        (wide, "parameters of dtype float64 with float32 rows"),
    ]:
        said = ops.explain("rms_norm", x, parameter, epsilon=1e-5).splitlines()
        assert any(line.endswith(f"  not cupy.rms_norm: {reason}") for line in said)
    with raises_line(ShapeError, r"rms_norm got x of shape \(2, 3\) and weight of shape \(1,\)"):
        ops.explain("rms_norm", x, one, epsilon=1e-5)


def test_gradients_of_some_inputs(cuda):
    arrays = [cuda.array(array) for array in (normal(5, 7), normal(7, seed=1), normal(7, seed=2))]
    g = cuda.array(normal(5, 7, seed=3))
    whole = vjp(layer_norm, *arrays)[1](g)
    for place, array in enumerate(arrays):
        _, pull = vjp(lambda own, place=place: layer_norm(*arrays[:place], own, *arrays[place + 1 :]), array)
        np.testing.assert_array_equal(to_host(pull(g)[0]), to_host(whole[place]))


@for_each("dtype", DTYPES)
@for_each("norm", [layer_norm, rms_norm])
@for_each("n", [33, 40])
def test_large_rows_do_not_overflow(cuda, dtype, norm, n):
    """The squares of these are beyond the range of the dtype that rows are computed in."""
    size = {"float16": 60000.0, "bfloat16": 1e30, "float32": 1e30, "float64": 1e200}[dtype]
    x, ones = normal(4, n), [cuda.array(np.ones(n), dtype)] * (1 if norm is rms_norm else 2)
    x = x / np.abs(x).max()
    y, pull = vjp(norm, cuda.array(size * x, dtype), *ones)
    small, small_pull = vjp(lambda x: norm(x, *ones, epsilon=0.0), cuda.array(x, dtype))
    tolerance = {"float32": 1e-5, "float64": 1e-12}.get(dtype, 0.05)
    assert_close(y, small, tolerance=tolerance)
    g = cuda.array(normal(4, n, seed=3), dtype)
    if dtype != "float16":  # whose derivative there is below its smallest number
        got, expected = to_host(pull(g)[0]).astype(float) * size, to_host(small_pull(g)[0]).astype(float)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * np.abs(expected).max())


@for_each("n", [8, 9])
@for_each("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinities_stay_in_their_row(cuda, n, value):
    x = normal(3, n)
    x[1, 2] = value
    y = to_host(layer_norm(cuda.array(x, "float32"), *(cuda.array(np.ones(n), "float32") for _ in range(2))))
    assert np.isnan(y).any(axis=-1).tolist() == [False, True, False]
