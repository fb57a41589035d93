"""What `import xformer` costs, and how large the wheel is.

    pytest bench/bench_import.py --benchmark-only -s

Fresh interpreters import xformer, nothing, and what others would import, in turns; the budget of xformer, beyond
Python's own start, is 100 ms. The wheel is built without network access, so hatchling must be installed; its budget is
365 kB.
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
from race import ROOT, Recorder

from xformer.benchmarks import Case, Entry, Work

TURNS = 15
PROGRAMS = {"import xformer": "import xformer", "Python alone": "pass"}
OTHERS = ("numpy", "torch", "jax", "ctranslate2", "transformers")


def work(settings: dict[str, Any]) -> Work:
    """A fresh interpreter that runs settings["program"], from start to exit."""
    # With bytecode, as an installed package has it, also where the environment forbids to write any.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-c", settings["program"]]
    return Work(lambda number: subprocess.run(command, env=environment, check=True))


def wheel_bytes() -> int:
    """Size of the wheel of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", folder, str(ROOT)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return wheel.stat().st_size


def test_import(benchmark: Any, recorder: Recorder) -> None:
    programs = {**PROGRAMS, **{f"import {name}": f"import {name}" for name in OTHERS if importlib.util.find_spec(name)}}
    entries = [Entry(name, "bench_import:work", {"program": program}) for name, program in programs.items()]
    result = recorder.race(benchmark, "import", Case("a fresh interpreter", {}, (0,)), entries, TURNS)
    seconds = {each["name"]: each["seconds"] for each in result["contenders"]}
    beyond = 1e3 * (seconds["import xformer"] - seconds["Python alone"])
    benchmark.extra_info["import_ms"] = beyond
    recorder.note("import", f"importing xformer takes {beyond:.0f} ms beyond Python's own start")


def test_wheel(benchmark: Any, recorder: Recorder) -> None:
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling")
    size = benchmark.pedantic(wheel_bytes, rounds=1)
    benchmark.extra_info["wheel_bytes"] = size
    recorder.note("import", f"the wheel has {size / 1e3:.0f} kB")
