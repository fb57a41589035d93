"""Products with packed weights by the native library against the portable definition, and rows of such weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.ops.native_cases import kernels, needs_library, single  # noqa: F401
from tests.reference import for_each, native_levels
from xformer import ops
from xformer.ops import embedding, linear
from xformer.ops.weights import PackedWeight, QuantizedWeight, packed_forward

pytestmark = needs_library

DTYPES = ["float32", "int8", "bfloat16"]


def matrix(depth, columns, dtype):
    """Return a matrix, or a quantized one."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    weight = single(depth, columns, seed=3)
    return weight if dtype == "float32" else QuantizedWeight.quantize(weight.T, dtype).T


@for_each("dtype", DTYPES)
@for_each("depth, columns", [(300, 95), (47, 2), (1, 1), (65, 48), (520, 97)])
def test_products(dtype, depth, columns):
    packed = PackedWeight.pack(matrix(depth, columns, dtype))
    for rows in (0, 1, 2, 3, 6, 43, 100):
        x = single(2 * rows, depth, seed=1)[::2]
        for bias in (None, single(columns, seed=2)):
            expected, _ = packed_forward(
                x.astype("float64"), packed.panels, packed.scales, bias, columns=columns, save=False
            )
            np.testing.assert_allclose(linear(x, packed, bias), expected, rtol=0.0, atol=4e-6 * depth)


def test_inputs_of_int8_weights_are_rounded_in_groups():
    table, x = single(95, 130, seed=3), single(5, 130, seed=1)
    x[:, 64:] *= 100.0
    x[1] = 0.0
    x[2, 129] = 1e30
    weight = QuantizedWeight.quantize(table, "int8").T
    padded = np.pad(x.astype("float64"), ((0, 0), (0, 62))).reshape(5, 3, 64)
    steps = abs(padded).max(axis=2, keepdims=True) / 127
    rounded = np.round(padded / np.where(steps, steps, 1)) * steps
    expected = rounded.reshape(5, 192)[:, :130] @ weight.dequantize()
    np.testing.assert_allclose(linear(x, PackedWeight.pack(weight)), expected, rtol=1e-5, atol=1e-4)


@for_each("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_makes_its_row_nan(value):
    x = single(3, 130)
    x[1, 129] = value
    y = linear(x, PackedWeight.pack(matrix(130, 95, "int8")))
    assert np.isnan(y).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(y[::2]).all()


def int8_products():
    packed = PackedWeight.pack(matrix(300, 95, "int8"))
    return np.concatenate([linear(single(rows, 300, seed=1), packed, single(95, seed=2)) for rows in (1, 4, 5, 43)])


@for_each("level", native_levels()[:-1])
def test_int8_products_have_the_same_bits_at_levels_with_fused_products(level):
    root = Path(__file__).parents[3]
    program = f"import sys; from {__name__} import *; sys.stdout.buffer.write(int8_products().tobytes())"
    environment = os.environ | {"PYTHONPATH": str(root), "XFORMER_NATIVE": level, "XFORMER_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, stdout=subprocess.PIPE, check=True
    )
    others, own = np.frombuffer(done.stdout, np.float32).reshape(-1, 95), int8_products()
    np.testing.assert_allclose(others, own, rtol=0.0, atol=1e-6 * abs(own).max() if level == "baseline" else 0.0)


@pytest.mark.usefixtures("reproducible")
@for_each("rows", [1, 8, 2000])
def test_products_have_the_bits_of_the_matrix(rows):
    weight, x = single(300, 120), single(rows, 300, seed=1)
    np.testing.assert_array_equal(linear(x, PackedWeight.pack(weight)), linear(x, weight))


@for_each("dtype", DTYPES)
def test_unpacking_restores_the_matrix(dtype):
    weight = matrix(20, 50, dtype)
    for original in (weight, weight.T):
        packed = PackedWeight.pack(original)
        assert packed.shape == original.shape
        restored = packed.unpack()
        if dtype == "float32":
            np.testing.assert_array_equal(restored, original)
        else:
            assert restored.is_transposed == original.is_transposed
            np.testing.assert_array_equal(restored.values.view("uint8"), original.values.view("uint8"))
            np.testing.assert_array_equal(restored.scales, original.scales)


@for_each("dtype", DTYPES)
def test_panels_begin_at_a_cache_line(dtype):
    assert PackedWeight.pack(matrix(24, 60, dtype)).panels.ctypes.data % 64 == 0


@for_each("dtype", DTYPES)
def test_rows_of_an_embedding(dtype):
    table = QuantizedWeight.quantize(single(101, 7), dtype) if dtype != "float32" else single(101, 7)
    ids = np.array([[0, 100, 47], [48, 95, 96]])
    np.testing.assert_array_equal(embedding(PackedWeight.pack(table.T).T, ids), embedding(table, ids))
    np.testing.assert_array_equal(embedding(PackedWeight.pack(table), ids), embedding(table, ids))


@for_each("dtype", DTYPES)
def test_a_program_looks_up_rows(dtype):
    packed, ids = PackedWeight.pack(matrix(20, 50, dtype)).T, np.array([[0, 49], [3, 48]])
    tables = [packed, packed.T] + ([packed.unpack()] if dtype != "float32" else [])
    for table in tables:
        np.testing.assert_array_equal(
            xf.jit(lambda ids, table=table: embedding(table, ids))(ids % 20), embedding(table, ids % 20)
        )


def test_explain_names_the_kernel():
    packed, x = PackedWeight.pack(single(20, 7)), single(3, 20)
    explanation = ops.explain("packed_linear", x, packed.panels, None, None, columns=7)
    assert explanation.startswith("packed_linear on numpy: native.packed_linear")
    explanation = ops.explain("packed_linear", x, packed.panels.astype("float64"), None, None, columns=7)
    assert "not native.packed_linear: panels of dtype float64" in explanation


@for_each("rows", [1, 6, 44, 1500])
@for_each("dtype", DTYPES)
def test_a_program_returns_the_bits_of_the_function(dtype, rows):
    weight, bias = PackedWeight.pack(matrix(300, 160, dtype)), single(160, seed=2)
    jitted = xf.jit(lambda x: linear(x, weight, bias))
    for seed in range(3):
        x = single(rows, 300, seed=seed)
        np.testing.assert_array_equal(jitted(x), linear(x, weight, bias))
