"""Quantized blocks: the values that the package gguf computes, products on every library, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.ops.numpy_cases import normal
from tests.reference import few_on_jax, for_each, raises_line
from xformer import grad, ops, value_and_grad
from xformer.backends import array_namespace, from_host, to_host
from xformer.errors import ShapeError
from xformer.families.gguf_file import QUANTIZED
from xformer.ops import blocks as definition
from xformer.ops import weights
from xformer.ops.blocks import BlockWeight, dequantize
from xformer.ops.embedding import embedding
from xformer.ops.weights import QuantizedWeight

gguf = pytest.importorskip("gguf")


def random_blocks(name, rows, count):
    """Return blocks of random bytes (rows, count, bytes) with finite scales, and their values."""
    kind = gguf.GGMLQuantizationType[name]
    blocks = np.random.default_rng(0).integers(0, 256, (rows, count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    starts = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}.get(name, (0,))
    for start in starts:
        scales = np.random.default_rng(start).normal(0.0, 0.01, (rows, count)).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    values = gguf.dequantize(blocks.reshape(max(1, rows * count), -1), kind) if rows else np.zeros(0, np.float32)
    return blocks, values.reshape(rows, count * gguf.GGML_QUANT_SIZES[kind][0])


def of_library(xp, blocks, is_transposed):
    return BlockWeight(from_host(xp, blocks), is_transposed)


@for_each("name", QUANTIZED)
def test_values_are_those_of_the_package_on_every_library(name, xp):
    if xp.name == "jax" and name not in ("Q4_1", "Q6_K"):
        pytest.skip("compiling each takes long")
    blocks, values = random_blocks(name, 5, 3)
    assert_close(dequantize(from_host(xp, blocks)), values, xp=xp, dtype="float32", tolerance=1e-7)


@pytest.mark.parametrize("name", QUANTIZED)
def test_numpy_computes_the_same_bits_in_chunks(name, monkeypatch):
    blocks, values = random_blocks(name, 7, 2)
    monkeypatch.setenv("XFORMER_KERNELS", "portable")
    for chunk in (1, 1000, 2**18):
        monkeypatch.setattr(definition, "_CHUNK", chunk)
        np.testing.assert_array_equal(dequantize(blocks), values)
        x = normal(3, values.shape[1])
        np.testing.assert_allclose(ops.linear(x, BlockWeight(blocks, True)), x @ values.T, atol=1e-12)


def test_all_bits_of_scales():
    """Halves that are subnormal, infinite or NaN, with both signs."""
    blocks = np.zeros((2**16, 1, 34), np.uint8)
    blocks[:, 0, :2] = np.arange(2**16, dtype=np.uint16)[:, None].view(np.uint8)
    blocks[:, 0, 2] = 1
    expected = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(dequantize(blocks)[:, 0], expected)


@few_on_jax("name", [(name,) for name in QUANTIZED], on_jax=[("Q4_1",)])
def test_linear_is_the_product_with_the_values(name, xp):
    blocks, values = random_blocks(name, 7, 2)
    x, bias = normal(2, 3, values.shape[1]).astype("float32"), normal(7).astype("float32")
    weight = of_library(xp, blocks, is_transposed=True)
    assert weight.shape == values.T.shape
    y = ops.linear(from_host(xp, x), weight, from_host(xp, bias), activation="relu")
    expected = x.astype("float64") @ values.T.astype("float64") + bias
    assert_close(y, np.maximum(expected, 0.0), xp=xp, dtype="float32")
    (heads,) = ops.project_heads(from_host(xp, x), (weight, None, 7))
    assert_close(heads, (expected - bias).reshape(2, 3, 7, 1).transpose(0, 2, 1, 3), xp=xp, dtype="float32")


def test_embedding_looks_up_rows(xp):
    blocks, values = random_blocks("Q5_1", 7, 2)
    weight, ids = of_library(xp, blocks, is_transposed=False), np.asarray([[6, 0, 1], [1, 1, 5]])
    y = embedding(weight, from_host(xp, ids), scale=3.0)
    assert_close(y, 3.0 * values[ids], xp=xp, dtype="float32")
    columns = embedding(weight.T, from_host(xp, np.asarray([19, 0])))
    assert_close(columns, values.T[[19, 0]], xp=xp, dtype="float32")
    one_hot = from_host(xp, np.eye(7, dtype="float32"))
    assert_close(ops.linear(one_hot, weight), values, xp=xp, dtype="float32")


@for_each("is_transposed", [False, True])
@for_each("rows, count", [(4, 3), (32, 1), (1, 1), (64, 2)])
def test_a_matrix_of_blocks_is_a_weight_without_a_copy(rows, count, is_transposed):
    blocks, values = random_blocks("Q8_0", rows, count)
    matrix = blocks.view("V34")[..., 0]
    matrix, expected = (matrix.T, values.T) if is_transposed else (matrix, values)
    weight = BlockWeight.of(matrix, expected.shape)
    assert weight.shape == expected.shape
    assert np.shares_memory(weight.blocks, blocks)
    np.testing.assert_array_equal(weight.unpack(), expected)
    np.testing.assert_array_equal(BlockWeight.of(matrix[:, ::2], expected[:, ::2].shape).shape[0], expected.shape[0])


def test_errors_are_one_line():
    blocks, _ = random_blocks("Q4_0", 7, 2)
    weight, x = BlockWeight(blocks, True), normal(3, 64).astype("float32")
    with raises_line(ShapeError, "linear got x of shape"):
        ops.linear(x[:, :32], weight)
    with raises_line(ShapeError, "dequantize got blocks .* expected blocks of 18, 20"):
        dequantize(blocks[..., :17])
    with raises_line(ShapeError, "dequantize got blocks of dtype float32; expected integers"):
        dequantize(blocks.astype("float32"))


@few_on_jax("name", [(name,) for name in QUANTIZED], on_jax=[("Q4_1",)])
def test_the_derivative_is_that_of_the_values(name, xp):
    """Of more rows than are dequantized at a time, and of an output layer that is tied to the embedding."""
    blocks, values = random_blocks(name, 70, 2)
    x, bias, g = (normal(*shape).astype("float32") for shape in ((2, 3, values.shape[1]), (70,), (2, 3, 70)))
    weight, g = of_library(xp, blocks, is_transposed=True), from_host(xp, g)

    def loss(x, bias):
        y = ops.linear(x, weight, bias) * g
        return array_namespace(y).sum(y)

    _, (dx, dbias) = value_and_grad(loss, argnums=(0, 1))(from_host(xp, x), from_host(xp, bias))
    cotangent = to_host(g).astype("float64")
    assert_close(dx, cotangent @ values, xp=xp, dtype="float32")
    assert_close(dbias, cotangent.sum((0, 1)), xp=xp, dtype="float32")


@pytest.mark.parametrize("mode", ["auto", "portable"])
def test_a_derivative_in_parts(mode, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    monkeypatch.setattr(weights, "_CHUNK", 160)
    blocks, values = random_blocks("Q8_0", 50, 3)
    int8 = QuantizedWeight.quantize(values, "int8")
    for weight, table in ((BlockWeight(blocks, True), values), (int8.T, int8.dequantize())):
        dx = grad(lambda x, weight=weight: ops.linear(x, weight).sum())(normal(4, 96).astype("float32"))
        np.testing.assert_allclose(dx, np.broadcast_to(table.sum(0), dx.shape), rtol=0, atol=2e-5)
