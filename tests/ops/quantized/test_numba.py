"""Compiled products with quantized weights against the portable definition."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.ops.numpy_cases import normal
from xformer import ops
from xformer.ops import linear
from xformer.ops.quantized.definition import QuantizedWeight, _forward

pytest.importorskip("numba")

from xformer.ops._numba import thread_pool as thread_pool
from xformer.ops.quantized import numba as compiled


@pytest.fixture(autouse=True)
def compile_all(monkeypatch):
    """Enable the kernels, with several threads also for small matrices."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    monkeypatch.setattr(thread_pool, "_MIN_MULTIPLICATIONS", 1)


def single(*shape, seed=0):
    return normal(*shape, seed=seed).astype("float32")


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize(("depth", "columns"), [(300, 95), (47, 2), (1, 1), (64, 0)])
def test_products(dtype, depth, columns, monkeypatch):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(compiled, "_BLOCK", 40 * depth)  # products of many rows take several blocks
    if columns:
        weight = QuantizedWeight.quantize(single(depth, columns).T, dtype).T
    else:
        weight = QuantizedWeight(single(0), np.empty((0, depth), "int8"), True)
    for rows in (0, 1, 3, 4, 6, compiled._MAX_ROWS, compiled._MAX_ROWS + 1):
        x = single(2 * rows, depth, seed=1)[::2]
        for bias in (None, single(columns, seed=2)):
            expected, _ = _forward(x.astype("float64"), weight.scales, weight.values, bias, save=False)
            np.testing.assert_allclose(linear(x, weight, bias), expected, rtol=0.0, atol=4e-6 * depth)


def test_the_kernel_runs_for_the_weight_of_a_linear_map():
    weight = QuantizedWeight.quantize(single(20, 7).T, "int8")
    x = single(3, 20)
    explanation = ops.explain("quantized_linear", x, weight.scales, weight.values, None)
    assert explanation.startswith("quantized_linear on numpy: numba.quantized_linear")
    explanation = ops.explain("quantized_linear", x, weight.scales, weight.values.astype("int32"), None)
    assert "not numba.quantized_linear: dtype int32" in explanation


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 6, compiled._MAX_ROWS + 1])
def test_a_replay_runs_no_python_code_of_the_kernel(dtype, rows, monkeypatch):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    monkeypatch.setattr(compiled, "_BLOCK", 300)  # products of many rows take several blocks
    weight, bias = QuantizedWeight.quantize(single(20, 50).T, dtype).T, single(50, seed=2)
    captured = xf.capture(lambda x: linear(x, weight, bias))
    inputs = [single(2 * rows, 20, seed=seed)[::2] for seed in range(3)]
    expected = [linear(x, weight, bias) for x in inputs]
    outputs = [captured(x) for x in inputs[:2]]  # recorded, and compared
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "kernels", None)
        outputs.append(captured(inputs[2]))
    np.testing.assert_array_equal(outputs, expected)
