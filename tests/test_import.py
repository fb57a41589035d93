"""`import xformer` in a fresh interpreter loads NumPy and nothing heavier."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Loaded by the functions and commands that need them.
NOT_LOADED = {
    "array_api_strict",
    "cupy",
    "jax",
    "matplotlib",
    "numba",
    "rich",
    "sacrebleu",
    "safetensors.numpy",
    "tokenizers",
    "torch",
    "typer",
}

PROGRAM = """
import json, sys, time
start = time.perf_counter()
import xformer
seconds = time.perf_counter() - start
print(json.dumps({"modules": sorted(sys.modules), "seconds": seconds}))
"""


def test_import_loads_no_optional_package():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    print(f"import xformer: {report['seconds'] * 1e3:.0f} ms beyond Python's start")
    assert "xformer.errors" in report["modules"]
    assert NOT_LOADED.intersection(report["modules"]) == set()
