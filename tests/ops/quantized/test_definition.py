"""Quantized weights: rounding, products on every library, and the refusal to differentiate them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.ops.numpy_cases import normal
from tests.reference import raises_line
from xformer import ops, vjp
from xformer.backends import from_host, to_host
from xformer.errors import ConfigError
from xformer.ops import weights as definition
from xformer.ops.embedding import embedding
from xformer.ops.weights import QuantizedWeight


def dequantized(weight):
    """Return the matrix in float64."""
    matrix = to_host(weight.values).astype("float64") * to_host(weight.scales).astype("float64")[:, None]
    return matrix.T if weight.is_transposed else matrix


def test_each_row_is_rounded_to_multiples_of_its_own_scale():
    weight = np.asarray([[254.0, -254.0, 3.0], [0.0, 0.0, 0.0], [0.5, 0.1, -1.27]], dtype="float32")
    quantized = QuantizedWeight.quantize(weight, "int8")
    assert quantized.values.tolist() == [[127, -127, 2], [0, 0, 0], [50, 10, -127]]
    np.testing.assert_allclose(quantized.scales, [2.0, 1.0, 0.01], rtol=1e-6)
    assert quantized.shape == (3, 3) == quantized.T.shape


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_rows_are_quantized_in_chunks_that_bound_the_memory(dtype, monkeypatch):
    pytest.importorskip("ml_dtypes")
    table = normal(7, 20).astype("float32")
    whole = QuantizedWeight.quantize(table, dtype)
    for chunk in (1, 60):
        monkeypatch.setattr(definition, "_CHUNK", chunk)
        for weight in (table, np.ascontiguousarray(table.T).T):
            quantized = QuantizedWeight.quantize(weight, dtype)
            for x, y in ((quantized.scales, whole.scales), (quantized.values, whole.values)):
                assert x.dtype == y.dtype
                np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("activation", [None, "relu"])
def test_linear_is_the_product_with_the_dequantized_weight(xp, activation):
    x, table, bias = (normal(*shape).astype("float32") for shape in [(2, 3, 20), (7, 20), (7,)])
    weight = QuantizedWeight.quantize(from_host(xp, table), "int8").T
    y = ops.linear(from_host(xp, x), weight, from_host(xp, bias), activation=activation)
    expected = x.astype("float64") @ dequantized(weight) + bias
    assert_close(y, expected if activation is None else np.maximum(expected, 0.0), xp=xp, dtype="float32")
    (heads,) = ops.project_heads(from_host(xp, x), (weight, None, 7))
    assert_close(heads, (expected - bias).reshape(2, 3, 7, 1).transpose(0, 2, 1, 3), xp=xp, dtype="float32")


def test_embedding_looks_up_dequantized_rows(xp):
    weight = QuantizedWeight.quantize(from_host(xp, normal(7, 20).astype("float32")), "int8")
    ids = np.asarray([[6, 0, 1], [1, 1, 5]])
    y = embedding(weight, from_host(xp, ids), scale=3.0)
    assert_close(y, 3.0 * dequantized(weight)[ids], xp=xp, dtype="float32")
    columns = embedding(weight.T, from_host(xp, np.asarray([19, 0])))
    assert_close(columns, dequantized(weight).T[[19, 0]], xp=xp, dtype="float32")
    one_hot = from_host(xp, np.eye(7, dtype="float32"))
    assert_close(ops.linear(one_hot, weight), dequantized(weight), xp=xp, dtype="float32")


def test_bfloat16_is_storage_and_sums_are_float32():
    pytest.importorskip("ml_dtypes")
    x, table = normal(3, 20).astype("float32"), normal(7, 20).astype("float32")
    weight = QuantizedWeight.quantize(table, "bfloat16")
    assert weight.values.dtype.name == "bfloat16"
    y = ops.linear(x, weight.T)
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, x.astype("float64") @ dequantized(weight).T, atol=1e-5)
    np.testing.assert_allclose(dequantized(weight), table, rtol=2**-8)


def test_results_have_the_dtype_of_the_scales():
    pytest.importorskip("ml_dtypes")
    weight = QuantizedWeight.quantize(normal(7, 20).astype("float32"), "int8").T.to(dtype="bfloat16")
    x = normal(3, 20).astype(weight.dtype)
    y = ops.linear(x, weight)
    assert y.dtype.name == "bfloat16"
    np.testing.assert_allclose(y.astype("float64"), x.astype("float64") @ dequantized(weight), rtol=0.01, atol=0.03)


def test_errors_are_one_line():
    with raises_line(ConfigError, "dtype is 'int4'; expected 'int8' or 'bfloat16'"):
        QuantizedWeight.quantize(normal(7, 20), "int4")


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_derivatives_pass_through_the_matrix(dtype):
    weight, x, bias = QuantizedWeight.quantize(normal(7, 20).astype("float32"), dtype), normal(3, 20), normal(7)
    x, bias, g = (each.astype("float32") for each in (x, bias, normal(3, 7)))
    _, pull = vjp(lambda x, bias: ops.linear(x, weight.T, bias), x, bias)
    dx, dbias = pull(g)
    np.testing.assert_allclose(dx, g @ dequantized(weight), rtol=0, atol=1e-5)
    np.testing.assert_allclose(dbias, g.sum(axis=0), rtol=0, atol=1e-6)
