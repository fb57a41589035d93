"""Products with quantized weights by the native library against the portable definition."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.ops.native_cases import kernels, needs_library, single  # noqa: F401
from xformer import ops
from xformer.ops import linear
from xformer.ops.weights import QuantizedWeight, quantized_forward

pytestmark = needs_library


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize(("depth", "columns"), [(300, 95), (47, 2), (1, 1), (64, 0)])
def test_products(dtype, depth, columns):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    if columns:
        weight = QuantizedWeight.quantize(single(depth, columns).T, dtype).T
    else:
        weight = QuantizedWeight(single(0), np.empty((0, depth), "int8"), True)
    for rows in (0, 1, 3, 4, 6, 43, 100):
        x = single(2 * rows, depth, seed=1)[::2]
        for bias in (None, single(columns, seed=2)):
            expected, _ = quantized_forward(x.astype("float64"), weight.scales, weight.values, bias, save=False)
            np.testing.assert_allclose(linear(x, weight, bias), expected, rtol=0.0, atol=4e-6 * depth)


def test_the_kernel_runs_for_the_weight_of_a_linear_map():
    weight = QuantizedWeight.quantize(single(20, 7).T, "int8")
    x = single(3, 20)
    explanation = ops.explain("quantized_linear", x, weight.scales, weight.values, None)
    assert explanation.startswith("quantized_linear on numpy: native.quantized_linear")
    explanation = ops.explain("quantized_linear", x, weight.scales, weight.values.astype("int32"), None)
    assert "not native.quantized_linear: dtype int32" in explanation


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 6, 44])
def test_a_program_returns_the_bits_of_the_function(dtype, rows):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    weight, bias = QuantizedWeight.quantize(single(20, 50).T, dtype).T, single(50, seed=2)
    jitted = xf.jit(lambda x: linear(x, weight, bias))
    for seed in range(3):
        x = single(2 * rows, 20, seed=seed)[::2]
        np.testing.assert_array_equal(jitted(x), linear(x, weight, bias))
