"""Quantized blocks of GGUF files have the bits that the package gguf computes, at every level."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.native.test_rounded import refuse
from tests.ops.blocks.test_definition import random_blocks as finite_blocks
from tests.reference import for_each, native_levels
from xformer import native
from xformer.errors import ShapeError
from xformer.families.gguf_file import QUANTIZED

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the library was not compiled")
gguf = pytest.importorskip("gguf")


def random_blocks(name: str, count: int) -> tuple[np.ndarray, int]:
    """Return blocks of random bytes, whose scales are also infinite, NaN and subnormal; and the values of each."""
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    blocks = np.random.default_rng(0).integers(0, 256, (count, num_bytes), np.uint8)
    scale = 208 if name == "Q6_K" else 0
    blocks[0, scale : scale + 2] = np.frombuffer(np.float16("inf").tobytes(), np.uint8)
    return blocks, num_values


def dequantized(name: str, count: int) -> np.ndarray:
    blocks, num_values = random_blocks(name, count)
    values = np.empty((count, num_values), np.float32)
    native.call("dequantize", (blocks, values))
    return values


@for_each("name", QUANTIZED)
@for_each("count", [1, 5000])
def test_blocks_of_random_bytes(name, count):
    blocks, num_values = random_blocks(name, count)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[name]).reshape(count, num_values)
    values = dequantized(name, count)
    assert np.isinf(values).any()
    assert count == 1 or np.isnan(values[1:]).any()
    np.testing.assert_array_equal(values, expected)  # NaN are equal
    np.testing.assert_array_equal(np.signbit(values[values == 0]), np.signbit(expected[values == 0]))


def products(name):
    """Return products of few and of many rows with finite blocks."""
    blocks, values = finite_blocks(name, 500, 3 if name.endswith("_K") else 24)  # several parts
    x = np.random.default_rng(1).normal(size=(40, values.shape[1])).astype(np.float32)
    results = []
    for rows in (1, 3, 7, 40):
        out = np.empty((rows, len(blocks)), np.float32)
        native.call("matmul_blocks", (x[:rows], blocks, out, None))
        results.append(out.ravel())
    return np.concatenate(results)


def run_with(program, **variables):
    """Return the float32 numbers that a program writes in another process."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root)} | variables
    command = [sys.executable, "-c", f"import sys\nfrom tests.native.test_blocks import *\n{program}"]
    done = subprocess.run(command, env=environment, cwd=root, stdout=subprocess.PIPE, check=True)
    return np.frombuffer(done.stdout, np.float32)


@for_each("level", native_levels()[:-1])
def test_levels_have_the_same_bits(level):
    program = "for name in QUANTIZED: sys.stdout.buffer.write(dequantized(name, 300).tobytes())"
    own = np.concatenate([dequantized(name, 300).ravel() for name in QUANTIZED])
    np.testing.assert_array_equal(run_with(program, XFORMER_NATIVE=level), own)


@for_each("level", native_levels()[:-1])
def test_products_have_the_same_bits_at_levels_with_fused_products(level):
    program = "for name in QUANTIZED: sys.stdout.buffer.write(products(name).tobytes())"
    own, others = np.concatenate([products(name) for name in QUANTIZED]), run_with(program, XFORMER_NATIVE=level)
    if level == "baseline":
        np.testing.assert_allclose(others, own, rtol=0.0, atol=1e-5 * np.abs(own).max())
    else:
        np.testing.assert_array_equal(others, own)


def test_products_have_the_same_bits_for_any_number_of_threads():
    program = "for name in QUANTIZED: sys.stdout.buffer.write(products(name).tobytes())"
    one, three = (run_with(program, XFORMER_NUM_THREADS=number) for number in "13")
    np.testing.assert_array_equal(one, three)


@for_each(
    "blocks, values, message",
    [
        (np.zeros((2, 19), np.uint8), np.empty((2, 32), np.float32), "no format has blocks of this size"),
        (np.zeros((2, 18), np.uint8), np.empty((2, 256), np.float32), "no format has blocks of this size"),
        (np.zeros((2, 18), np.uint8), np.empty((3, 32), np.float32), "as many rows as blocks"),
        (np.zeros((2, 18), np.int8), np.empty((2, 32), np.float32), "expected uint8 blocks"),
        (np.zeros((2, 18), np.uint8), np.empty((2, 64), np.float32)[:, ::2], "expected contiguous arrays"),
    ],
)
def test_other_arrays_are_refused(blocks, values, message):
    with pytest.raises(ShapeError, match=message):
        native.call("dequantize", (blocks, values))


@for_each(
    "changes, message",
    [
        ({0: np.zeros((3, 65), np.float32)}, "depths differ"),
        ({0: np.zeros((3, 64), np.float64)}, "expected float32"),
        ({0: np.zeros((2, 64), np.float32)}, "rows differ"),
        ({0: None}, "expected x, w and out"),
        ({1: np.zeros((5, 2, 19), np.uint8)}, "no format has blocks of this size"),
        ({1: np.zeros((5, 2, 18), np.int8)}, "expected w of uint8"),
        ({1: np.zeros((5, 36), np.uint8)}, "expected matrices"),
        ({1: np.zeros((6, 2, 18), np.uint8)}, "the blocks are of another matrix"),
        ({1: np.zeros((5, 3, 18), np.uint8)}, "depths differ"),
        ({2: np.zeros((3, 10), np.float32)[:, ::2]}, "expected rows of out to be contiguous"),
        ({2: np.zeros((1, 3, 5), np.float32)}, "the blocks are of another matrix"),
        ({3: np.zeros(4, np.float32)}, "for the columns of out"),
    ],
)
def test_other_arrays_of_products_are_refused(changes, message):
    arrays = [np.zeros((3, 64), np.float32), np.zeros((5, 2, 18), np.uint8), np.zeros((3, 5), np.float32), None]
    native.call("matmul_blocks", tuple(arrays))
    for index, array in changes.items():
        arrays[index] = array
    with pytest.raises(ShapeError, match=message):
        native.call("matmul_blocks", tuple(arrays))


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@for_each(
    "changes, message",
    [
        ({0: np.zeros((3, 64))}, "expected float32, int8, float32 and float32"),
        ({0: zeros(2, 64)}, "expected matrices"),
        ({1: zeros(3, 64, dtype=np.uint8)}, "expected float32, int8, float32 and float32"),
        ({2: zeros(3, 1)}, "groups differ"),
        ({2: zeros(2, 2)}, "rows differ"),
        ({3: zeros(3, 2)}, "groups differ"),
        ({3: None}, "expected x, out, scales and sums"),
        ({2: zeros(3, 4)[:, ::2]}, "expected contiguous rows"),
    ],
)
def test_other_arrays_are_not_rounded(changes, message):
    refuse("round_groups", [zeros(3, 64), zeros(3, 64, dtype=np.int8), zeros(3, 2), zeros(3, 4)], changes, message)


@for_each(
    "changes, message",
    [
        ({0: zeros(3, 32, dtype=np.int8)}, "the strips are of another matrix"),
        ({0: zeros(3, 64, dtype=np.uint8)}, "expected int8, float32, float32, uint8 and float32"),
        ({1: zeros(3, 3)}, "groups differ"),
        ({2: zeros(2, 4)}, "rows differ"),
        ({3: zeros(2, 2, 16 * 19, dtype=np.uint8)}, "no format has strips of this size"),
        ({3: zeros(2, 2, 290, dtype=np.uint8)}, "no format has strips of this size"),
        ({3: zeros(1, 2, 288, dtype=np.uint8)}, "the strips are of another matrix"),
        ({4: zeros(4, 20)}, "rows differ"),
        ({4: zeros(3, 40)[:, ::2]}, "expected contiguous rows"),
        ({5: zeros(19)}, "for the columns of out"),
        ({4: None}, "expected rounded rows, strips and out"),
    ],
)
def test_other_arrays_are_not_multiplied_by_strips(changes, message):
    arrays = [
        zeros(3, 64, dtype=np.int8),
        zeros(3, 2),
        zeros(3, 4),
        zeros(2, 2, 288, dtype=np.uint8),
        zeros(3, 20),
        zeros(20),
    ]
    refuse("matmul_strips", arrays, changes, message)
