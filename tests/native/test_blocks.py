"""Quantized blocks of GGUF files have the bits that the package gguf computes, at every level."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from xformer import native
from xformer.errors import ShapeError
from xformer.families.gguf_file import QUANTIZED

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the library was not compiled")
gguf = pytest.importorskip("gguf")
LEVELS = ["", "baseline", "avx2", "avx512"]  # without the library, there is none


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


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("count", [1, 5000])
def test_blocks_of_random_bytes(name, count):
    blocks, num_values = random_blocks(name, count)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = gguf.dequantize(blocks.reshape(1, -1), gguf.GGMLQuantizationType[name]).reshape(count, num_values)
    values = dequantized(name, count)
    assert np.isinf(values).any()
    assert count == 1 or np.isnan(values[1:]).any()
    np.testing.assert_array_equal(values, expected)  # NaN are equal
    np.testing.assert_array_equal(np.signbit(values[values == 0]), np.signbit(expected[values == 0]))


@pytest.mark.parametrize("level", ["baseline", "avx2"][: max(1, LEVELS.index(native.level()))])
def test_levels_have_the_same_bits(level):
    program = (
        "import sys\nfrom tests.native.test_blocks import QUANTIZED, dequantized\n"
        "for name in QUANTIZED:\n    sys.stdout.buffer.write(dequantized(name, 300).tobytes())"
    )
    root = Path(__file__).parents[2]
    environment = os.environ | {"XFORMER_NATIVE": level, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, stdout=subprocess.PIPE, check=True
    )
    own = np.concatenate([dequantized(name, 300).ravel() for name in QUANTIZED])
    np.testing.assert_array_equal(np.frombuffer(done.stdout, np.float32), own)


@pytest.mark.parametrize(
    ("blocks", "values", "message"),
    [
        (np.zeros((2, 19), np.uint8), np.empty((2, 32), np.float32), "no format has blocks of this size"),
        (np.zeros((2, 18), np.uint8), np.empty((2, 256), np.float32), "no format has blocks of this size"),
        (np.zeros((2, 18), np.uint8), np.empty((3, 32), np.float32), "as many rows as blocks"),
        (np.zeros((2, 18), np.int8), np.empty((2, 32), np.float32), "expected uint8 blocks"),
        (np.zeros((2, 36), np.uint8)[:, ::2], np.empty((2, 32), np.float32), "expected contiguous arrays"),
    ],
)
def test_other_arrays_are_refused(blocks, values, message):
    with pytest.raises(ShapeError, match=message):
        native.call("dequantize", (blocks, values))
