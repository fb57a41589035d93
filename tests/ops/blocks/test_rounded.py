"""Products of rounded rows by quantized blocks: the definition on every library, and the native library against it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.ops.blocks.test_definition import random_blocks
from tests.ops.native_cases import kernels, needs_library, single  # noqa: F401
from tests.reference import for_each, native_levels, raises_line
from xformer import ops
from xformer.backends import from_host
from xformer.errors import ShapeError
from xformer.families.gguf_file import QUANTIZED
from xformer.ops.blocks import BlockWeight, PackedBlocks
from xformer.ops.embedding import embedding


def packed(name, rows, count):
    """Return a weight for rows, and its values."""
    blocks, values = random_blocks(name, rows, count)
    return PackedBlocks.pack(BlockWeight(blocks, True)), values


def after_rounding(x):
    """Return rows in float64 after rounding groups of 32 to multiples of their largest magnitude / 127."""
    groups = x.reshape(len(x), x.shape[1] // 32, 32)
    scales = np.max(np.abs(groups), axis=2, keepdims=True) / np.float32(127)
    scales[scales < 1.2e-38] = 1.0
    return (np.round(groups / scales) * scales.astype("float64")).reshape(x.shape)


@for_each("name", QUANTIZED)
def test_every_library_rounds_the_rows(name, xp):
    if xp.name == "jax" and name not in ("Q4_1", "Q6_K"):
        pytest.skip("compiling each takes long")
    weight, values = packed(name, 21, 2)
    x, bias = single(3, values.shape[1]), single(21, seed=1)
    assert_close(weight.unpack(), values.T, xp=np, dtype="float32", tolerance=1e-7)
    moved = PackedBlocks(from_host(xp, weight.blocks), True, weight.rows)
    y = ops.linear(from_host(xp, x), moved, from_host(xp, bias))
    assert_close(y, after_rounding(x) @ values.T + bias, xp=xp, dtype="float32")
    ids = from_host(xp, np.asarray([[20, 0], [15, 16]]))
    assert_close(embedding(moved.T, ids), values[[[20, 0], [15, 16]]], xp=xp, dtype="float32", tolerance=1e-7)


@needs_library
@for_each("name", QUANTIZED)
@for_each("columns, count", [(95, 3), (2, 1), (16, 5), (0, 2), (300, 20)])
def test_native_products(name, columns, count, monkeypatch):
    weight, values = packed(name, columns, count)
    bias, is_large = single(columns, seed=2), columns * count > 1000
    for rows in (13, 300) if is_large else (0, 1, 2, 3, 8, 12, 13, 33, 100, 300):
        x = single(2 * rows, values.shape[1], seed=1)[::2]
        rounded = after_rounding(x)
        product, largest = rounded @ values.T.astype("float64"), np.max(np.abs(rounded) @ np.abs(values.T), initial=0.0)
        tolerance = 2e-7 * largest + 1e-6
        np.testing.assert_allclose(ops.linear(x, weight, bias), product + bias, rtol=0.0, atol=tolerance)
        if not is_large:
            np.testing.assert_allclose(ops.linear(x, weight, None), product, rtol=0.0, atol=tolerance)
    with monkeypatch.context() as changes:
        changes.setenv("XFORMER_KERNELS", "portable")
        definition = ops.linear(x, weight, bias)
    np.testing.assert_allclose(ops.linear(x, weight, bias), definition, rtol=0.0, atol=1e-6 * largest + 1e-6)


@needs_library
@for_each("name", QUANTIZED)
def test_extreme_rows(name):
    weight, values = packed(name, 33, 3)
    x = single(9, values.shape[1])
    x[0] = 0.0
    x[1] *= 1e30
    x[2, 32:64] = 0.0
    x[3] *= 1e-44  # subnormal: scales would round to zero, or to too small a number
    x[4] = 127.0  # the largest sums of integers
    x[5] = -127.0
    for row, value in zip((6, 7, 8), (np.nan, np.inf, -np.inf), strict=True):
        x[row, -1] = value
    y = ops.linear(x, weight)
    assert np.isnan(y).all(axis=1).tolist() == [False] * 6 + [True] * 3
    expected = after_rounding(x[:6]) @ values.T.astype("float64")
    largest = np.abs(after_rounding(x[:6])) @ np.abs(values.T)
    assert (abs(y[:6] - expected) <= 1e-6 * largest + 1e-37).all()
    assert not y[0].any()
    assert not y[3].any()


def products(name):
    weight, values = packed(name, 95, 3)
    x = single(43, values.shape[1], seed=1)
    return [ops.linear(x[:rows], weight, single(95, seed=2)) for rows in (1, 5, 12, 43)]


@needs_library
def test_bits_depend_neither_on_the_number_of_rows_nor_on_threads_nor_on_the_level():
    own = {name: products(name) for name in QUANTIZED}
    for fewer, *more in own.values():
        for each in more:
            np.testing.assert_array_equal(each[: len(fewer)], fewer)
    root = Path(__file__).parents[3]
    program = f"import sys; from {__name__} import *\n"
    program += "for name in QUANTIZED: sys.stdout.buffer.write(b''.join(y.tobytes() for y in products(name)))"
    expected = np.concatenate([y.ravel() for each in own.values() for y in each])
    for level in native_levels():
        environment = os.environ | {"PYTHONPATH": str(root), "XFORMER_NATIVE": level, "XFORMER_NUM_THREADS": "3"}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, check=True)
        others = np.frombuffer(done.stdout, np.float32)
        tolerance = 1e-6 * abs(expected).max() if level == "baseline" else 0.0  # which has no fused products
        np.testing.assert_allclose(others, expected, rtol=0.0, atol=tolerance)


@needs_library
@for_each("name", ["Q4_1", "Q6_K"])
@for_each("rows", [1, 44])
def test_a_program_returns_the_bits_of_the_function(name, rows):
    weight, values = packed(name, 160, 2)
    jitted = xf.jit(lambda x: ops.linear(x, weight))
    look_up = xf.jit(lambda ids: embedding(weight.T, ids))
    for seed in range(3):
        x, ids = single(rows, values.shape[1], seed=seed), np.random.default_rng(seed).integers(0, 160, (2, 3))
        np.testing.assert_array_equal(jitted(x), ops.linear(x, weight))
        np.testing.assert_array_equal(look_up(ids), values[ids])


@needs_library
def test_errors_are_one_line_and_explain_names_the_kernel():
    weight, _ = packed("Q4_0", 7, 2)
    x = single(3, 64)
    explanation = ops.explain("rounded_block_linear", x, weight.blocks, None, columns=7)
    assert explanation.startswith("rounded_block_linear on numpy: native.rounded_block_linear")
    with raises_line(ShapeError, "linear got x of shape"):
        ops.linear(x[:, :32], weight)
