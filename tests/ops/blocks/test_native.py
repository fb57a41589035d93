"""Products with quantized blocks by the native library against float64."""

from __future__ import annotations

import numpy as np

import xformer as xf
from tests.ops.blocks.test_definition import random_blocks
from tests.ops.native_cases import kernels, needs_library, single  # noqa: F401
from tests.reference import for_each
from xformer import ops
from xformer.families.gguf_file import QUANTIZED
from xformer.ops import linear
from xformer.ops.blocks import BlockWeight
from xformer.ops.embedding import embedding

pytestmark = needs_library


@for_each("name", QUANTIZED)
@for_each("rows, count", [(95, 3), (2, 1), (1, 5), (260, 1), (0, 2), (300, 20)])
def test_products(name, rows, count):
    blocks, values = random_blocks(name, rows, count)
    weight, bias = BlockWeight(blocks, True), single(2 * rows, seed=2)[::2]
    is_large = rows * count > 1000
    for number in (13, 300) if is_large else (0, 1, 2, 3, 4, 7, 12, 13, 100, 300):
        x = single(2 * number, values.shape[1], seed=1)[::2]
        product = x.astype("float64") @ values.T.astype("float64")
        tolerance = 1e-6 * np.max(np.abs(x) @ np.abs(values.T), initial=0.0) + 1e-6
        np.testing.assert_allclose(linear(x, weight, bias), product + bias, rtol=0.0, atol=tolerance)
        if not is_large:
            np.testing.assert_allclose(linear(x, weight, None), product, rtol=0.0, atol=tolerance)


def test_explain_names_the_kernel():
    blocks, _ = random_blocks("Q4_K", 7, 1)
    x = single(3, 256)
    assert ops.explain("block_linear", x, blocks, None).startswith("block_linear on numpy: native.block_linear")
    assert ops.explain("dequantize", blocks).startswith("dequantize on numpy: native.dequantize")
    explanation = ops.explain("block_linear", x, blocks.astype("int32"), None)
    assert "not native.block_linear: blocks of dtype int32" in explanation
    explanation = ops.explain("dequantize", np.asfortranarray(blocks))
    assert "not native.dequantize: the blocks are not contiguous" in explanation


@for_each("name", ["Q4_1", "Q6_K"])
@for_each("rows", [1, 6, 44, 300])
def test_a_program_returns_the_bits_of_the_function(name, rows):
    blocks, values = random_blocks(name, 160, 2)
    weight, bias = BlockWeight(blocks, True), single(160, seed=2)
    jitted = xf.jit(lambda x: linear(x, weight, bias))
    for seed in range(3):
        x = single(2 * rows, values.shape[1], seed=seed)[::2]
        np.testing.assert_array_equal(jitted(x), linear(x, weight, bias))
    look_up = xf.jit(lambda ids: embedding(weight.T, ids))
    for seed in range(3):
        ids = np.random.default_rng(seed).integers(0, 160, (2, 3))
        np.testing.assert_array_equal(look_up(ids), values[ids])
