"""The library for another processor computes the same bits: operations of a training run, replayed in an emulator."""

from __future__ import annotations

import collections
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.conftest import needs_fused_products
from xformer import native as library
from xformer.cli import verify

TYPES = library._TYPES
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
ROOT = Path(__file__).parents[2]
MOST = 10  # calls of an operation
EXPECTED = {
    "matmul",
    "matmul_rounded",
    "attention",
    "attention_vjp",
    "norm",
    "norm_vjp",
    "softmax",
    "softmax_vjp",
    "gelu",
}
EXPECTED |= {"cross_entropy", "cross_entropy_vjp", "logistic_unit", "rotate", "dropout", "adam", "add_rows", "sum_rows"}


class Recorder:
    """The native library, which writes calls with their inputs and outputs to a file."""

    def __init__(self, file):
        self.file, self.library, self.names = file, library.LIB, list(library.OPERATIONS)
        self.seen, self.counts = set(), collections.Counter()

    def __getattr__(self, name):
        return getattr(self.library, name)

    def xf_call(self, operation, arrays, *numbers):
        name = self.names[operation]
        key = name, *numbers[:4], *(None if x is None else (x.dtype, x.shape) for x in arrays)
        is_new = key not in self.seen and self.counts[name] < MOST
        inputs = [array_bytes(x, arrays) for x in arrays] if is_new else []
        error = self.library.xf_call(operation, arrays, *numbers)
        outputs = [i for i, x in enumerate(arrays) if x is not None and library._OUTPUTS[name] >> i & 1]
        if is_new and error is None and not any(overlaps(arrays[i], arrays) for i in outputs):
            self.seen.add(key)
            self.counts[name] += 1
            head = struct.pack("<32s4q4dq", name.encode(), *numbers[:8], len(arrays))
            results = [struct.pack(f"<{len(outputs) + 1}q", len(outputs), *outputs)]
            self.file.write(b"".join([head, *inputs, *results, *(arrays[i].tobytes() for i in outputs)]))
        return error


def array_bytes(x, arrays):
    """Return the type of an array, its sizes, which earlier argument is the same array, its shape and its elements."""
    if x is None:
        return struct.pack("<5q", -1, 0, 0, 0, -1)
    first = next(i for i, other in enumerate(arrays) if is_same(other, x))
    same = first if any(is_same(other, x) for other in arrays[first + 1 :]) else -1
    return (
        struct.pack(f"<{5 + x.ndim}q", TYPES[x.dtype.name], x.ndim, x.itemsize, x.nbytes, same, *x.shape) + x.tobytes()
    )


def is_same(a, b):
    return a is not None and (a.ctypes.data, a.shape, a.strides, a.dtype) == (
        b.ctypes.data,
        b.shape,
        b.strides,
        b.dtype,
    )


def overlaps(output, arrays):
    """Return whether another array has a part of the memory of an output."""
    others = (x for x in arrays if x is not None and not is_same(x, output))
    return any(np.may_share_memory(x, output) for x in others)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}")
@needs_fused_products
def test_aarch64_computes_the_same_bits(tmp_path, monkeypatch):
    environment = {**os.environ, "CXX": COMPILER, "XFORMER_NATIVE_LIBRARY": str(tmp_path / "libxformer.so")}
    subprocess.run([sys.executable, ROOT / "xformer" / "native" / "build.py"], env=environment, check=True)
    harness = [COMPILER, "-O1", "-std=c++17", Path(__file__).with_name("replay.cpp"), "-o", tmp_path / "replay", "-ldl"]
    subprocess.run(harness, check=True)
    monkeypatch.setattr(verify, "_STEPS", 2)
    x = np.random.default_rng(0).normal(0.0, 3.0, (50, 99)).astype(np.float32)
    with open(tmp_path / "calls", "wb") as file:
        recorder = Recorder(file)
        monkeypatch.setattr(library, "LIB", recorder)
        for _, _, values in verify._numbers():
            list(values)
        for function in (xf.ops.gelu, xf.ops.softmax):
            xf.vjp(function, x)[1](x)
    assert recorder.counts.keys() >= EXPECTED
    replay = [EMULATOR, "-L", "/usr/aarch64-linux-gnu", tmp_path / "replay", tmp_path / "calls"]
    done = subprocess.run([*replay, tmp_path / "libxformer.so"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{recorder.counts.total()} operations of {len(recorder.counts)} kinds\n"
