from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.reference import native_levels
from xformer.cli import verify

ROOT = Path(__file__).parents[2]
LEVELS = [level for level in native_levels() if level != "baseline"]
# Names of NumPy's kernels for AVX-512 that 2.4 can leave out; products of an old processor.
OTHER = {"NPY_DISABLE_CPU_FEATURES": "X86_V4"}, {"OPENBLAS_CORETYPE": "Nehalem"}


@pytest.mark.parametrize(
    ("level", "threads"),
    [*((level, 1) for level in LEVELS), *(pytest.param(level, 2, marks=pytest.mark.slow) for level in LEVELS[-1:])],
)
def test_the_hash_is_that_of_the_readme(level, threads):
    environment = os.environ | {"XFORMER_NATIVE": level, "XFORMER_NUM_THREADS": str(threads)}
    environment |= OTHER[(threads + LEVELS.index(level)) % 2]
    command = [sys.executable, "-m", "xformer", "verify"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    expected = re.findall(r"`([0-9a-f]{64})`", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert [done.stdout.strip()] == expected, "if the change of numbers is meant, write the new hash into README.md"


@pytest.mark.parametrize("level", ["off", "baseline"])
def test_the_command_needs_fused_products(level):
    command = [sys.executable, "-m", "xformer", "verify"]
    done = subprocess.run(
        command, env=os.environ | {"XFORMER_NATIVE": level}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "need the native library with AVX2, AVX-512 or NEON" in done.stderr


def test_the_command_says_what_differs(xformer, monkeypatch):
    logits = np.ones(3, np.float32)
    numbers = [("logits", "alone", [logits, logits]), ("logits", "padded", [logits, np.nextafter(logits, 2)])]
    monkeypatch.setattr(xf, "use_reproducible_algorithms", lambda: None)
    monkeypatch.setattr(verify, "_numbers", lambda: iter(numbers))
    assert xformer("verify") == (1, "", "different: logits 2 is not the same alone and padded\n")
    del numbers[1]
    done = xformer("verify", "--json")
    expected = hashlib.sha256(2 * logits.tobytes()).hexdigest()
    assert (done.code, json.loads(done.out)["parts"]) == (0, {"logits": expected})
