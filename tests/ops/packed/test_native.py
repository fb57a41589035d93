"""Products with packed weights by the native library against the portable definition, and rows of such weights."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.ops.numpy_cases import normal
from xformer import native, ops
from xformer.ops import embedding, linear
from xformer.ops.packed.definition import PackedWeight, _forward
from xformer.ops.quantized.definition import QuantizedWeight

if not native.is_available():
    pytest.skip(native.WHY_NOT, allow_module_level=True)

DTYPES = ["float32", "int8", "bfloat16"]


@pytest.fixture(autouse=True)
def native_kernels(monkeypatch):
    """Enable the kernels."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")


def single(*shape, seed=0):
    return normal(*shape, seed=seed).astype("float32")


def matrix(depth, columns, dtype):
    """Return a matrix, or a quantized one."""
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    weight = single(depth, columns, seed=3)
    return weight if dtype == "float32" else QuantizedWeight.quantize(weight.T, dtype).T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("depth", "columns"), [(300, 95), (47, 2), (1, 1), (65, 48), (520, 97)])
def test_products(dtype, depth, columns):
    packed = PackedWeight.pack(matrix(depth, columns, dtype))
    for rows in (0, 1, 2, 3, 6, 43, 100):
        x = single(2 * rows, depth, seed=1)[::2]
        for bias in (None, single(columns, seed=2)):
            expected, _ = _forward(x.astype("float64"), packed.panels, packed.scales, bias, columns=columns, save=False)
            np.testing.assert_allclose(linear(x, packed, bias), expected, rtol=0.0, atol=4e-6 * depth)


@pytest.mark.parametrize("rows", [1, 8, 2000])
def test_products_have_the_bits_of_the_matrix(rows):
    weight, x = single(300, 120), single(rows, 300, seed=1)
    np.testing.assert_array_equal(linear(x, PackedWeight.pack(weight)), linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_an_embedding(dtype):
    table = QuantizedWeight.quantize(single(101, 7), dtype) if dtype != "float32" else single(101, 7)
    ids = np.array([[0, 100, 47], [48, 95, 96]])
    np.testing.assert_array_equal(embedding(PackedWeight.pack(table.T).T, ids), embedding(table, ids))
    np.testing.assert_array_equal(embedding(PackedWeight.pack(table), ids), embedding(table, ids))


@pytest.mark.parametrize("dtype", DTYPES)
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


@pytest.mark.parametrize("rows", [1, 6, 44, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_program_returns_the_bits_of_the_function(dtype, rows):
    weight, bias = PackedWeight.pack(matrix(300, 160, dtype)), single(160, seed=2)
    jitted = xf.jit(lambda x: linear(x, weight, bias))
    for seed in range(3):
        x = single(rows, 300, seed=seed)
        np.testing.assert_array_equal(jitted(x), linear(x, weight, bias))
