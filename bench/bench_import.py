"""Import time of xformer and size of its wheel.

    pytest bench/bench_import.py --benchmark-only -s

Fresh interpreters import xformer, nothing, and other libraries. The wheel is built without network access, so hatchling
must be installed.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from recorder import ROOT, Recorder

from xformer.benchmarks.computation import Computation
from xformer.benchmarks.interleaved import Spec, Workload

ROUNDS = 15
PROGRAMS = {"import xformer": "import xformer", "Python alone": "pass"}
OTHERS = ("numpy", "torch", "jax", "ctranslate2", "transformers")


def build(settings: dict[str, Any]) -> Computation:
    """Build the run of a fresh interpreter that executes settings["program"]."""
    # Use bytecode files, as an installed package does, even if the environment forbids writing them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", settings["program"]]
    return Computation(lambda index: subprocess.run(command, env=environment, check=True))


def wheel_bytes() -> int:
    """Return the size of the wheel of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", folder, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return wheel.stat().st_size


def test_import(benchmark: Any, recorder: Recorder) -> None:
    programs = {**PROGRAMS, **{f"import {name}": f"import {name}" for name in OTHERS if importlib.util.find_spec(name)}}
    specs = [Spec(name, "bench_import:build", {"program": program}) for name, program in programs.items()]
    result = recorder.measure(benchmark, "import", Workload("a fresh interpreter", {}, (0,)), specs, ROUNDS)
    seconds = {each["name"]: each["seconds"] for each in result["implementations"]}
    milliseconds = 1e3 * (seconds["import xformer"] - seconds["Python alone"])
    benchmark.extra_info["import_ms"] = milliseconds
    recorder.note("import", f"importing xformer takes {milliseconds:.0f} ms more than starting Python")


def test_wheel(benchmark: Any, recorder: Recorder) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling")
    size = benchmark.pedantic(wheel_bytes, rounds=1)
    benchmark.extra_info["wheel_bytes"] = size
    recorder.note("import", f"the wheel has {size / 1e3:.0f} kB")
