"""Tests and benchmarks on a machine with a GPU: `python bench/gpu.py tests DIR`, `python bench/gpu.py bench DIR`.

Requires `pip install -e '.[cli,cuda,cudnn]' pytest pytest-benchmark hypothesis`, and torch for `bench`. All output goes
to DIR. A short table is printed last, even if the time limit (XFORMER_GPU_SECONDS, default 500) is reached first.
Arguments after DIR are passed to pytest. `python bench/gpu.py check` only reports whether there is a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_DEADLINE = "XFORMER_GPU_UNTIL"
# Preinstalled packages may use deprecated functions of each other.
DEPRECATIONS = [
    f"-Wdefault::{category}" for category in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
]


def main(arguments: list[str]) -> int:
    """Run the tests or benchmarks; return the exit status of pytest, or 2 without a GPU."""
    if arguments == ["check"]:
        return refuse(no_driver())
    if len(arguments) < 2 or arguments[0] not in ("tests", "bench"):
        received = " ".join(arguments) or "no arguments"
        return refuse(f"got {received}; expected tests or bench, and a directory for the results")
    suite, folder, pytest_options = arguments[0], Path(arguments[1]), arguments[2:]
    missing = missing_requirement(suite)
    if folder.exists() and not folder.is_dir():
        missing = f"{folder} is a file; expected a directory for the results"
    if missing:
        return refuse(missing)
    folder.mkdir(parents=True, exist_ok=True)
    return (run_tests if suite == "tests" else run_bench)(folder.resolve(), pytest_options)


def refuse(reason: str | None) -> int:
    """Print the reason, if any, as an error; return the exit status."""
    if reason:
        print(f"error: {reason}", file=sys.stderr)
    return 2 if reason else 0


def missing_requirement(suite: str) -> str | None:
    """Return why nothing can run here and how to fix it, or None."""
    required = {"tests": ("cupy", "pytest", "hypothesis"), "bench": ("cupy", "pytest", "pytest_benchmark", "torch")}
    unavailable = [name for name in required[suite] if importlib.util.find_spec(name) is None]
    if unavailable:
        packages = "'.[cli,cuda,cudnn]' pytest pytest-benchmark hypothesis" + (" torch" if suite == "bench" else "")
        return f"{' and '.join(unavailable)} cannot be imported; run: pip install {packages}"
    return no_gpu()


def no_gpu() -> str | None:
    """Return why CuPy cannot be used, or None."""
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed"
    missing = no_driver()
    if missing is None and not importlib.import_module("cupy").cuda.is_available():
        missing = "cupy finds no usable GPU; check the driver version with nvidia-smi"
    return missing


def no_driver() -> str | None:
    """Return why the driver offers no GPU, or None."""
    count = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return "no NVIDIA driver is installed; expected a machine with an NVIDIA GPU"
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the driver finds no NVIDIA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def run_tests(folder: Path, pytest_options: list[str]) -> int:
    """Run every test that needs the GPU."""
    report = folder / "gpu-tests.xml"
    report.unlink(missing_ok=True)
    options = "-q", "--no-header", "--tb=short", "--continue-on-collection-errors", f"--junitxml={report}"
    code = pytest("tests", "-m", "gpu", *options, *pytest_options)
    if report.exists():
        rows = outcomes(report)
        show([("file", "passed", "failed", "skipped"), *rows], folder / "gpu-tests.txt")
    return code


def run_bench(folder: Path, pytest_options: list[str]) -> int:
    """Run every benchmark against torch on the GPU."""
    code = pytest("bench/bench_gpu.py", "-q", "-s", "--benchmark-only", f"--results={folder}", *pytest_options)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    show([("case", "time", "of GEMM", "best baseline", "ratio"), *ratios(runs)], folder / "gpu-bench.txt")
    return code


def pytest(*arguments: str) -> int:
    """Run pytest with this file as a plugin; interrupt it a minute after the time limit."""
    seconds = float(os.environ.get("XFORMER_GPU_SECONDS", "500"))
    path = os.pathsep.join(filter(None, (str(ROOT / "bench"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, _DEADLINE: str(time.time() + seconds)}
    command = [sys.executable, "-m", "pytest", "-p", "gpu", *DEPRECATIONS, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        for timeout, signal_number in ((seconds + 60, signal.SIGINT), (15, signal.SIGTERM)):
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal_number)
        process.kill()
    return process.returncode


def pytest_runtest_teardown(item: Any) -> None:
    """Stop before the next test once the time limit is reached (pytest hook)."""
    if time.time() > float(os.environ[_DEADLINE]):
        item.session.shouldstop = "time limit reached"


def outcomes(report: Path) -> list[tuple[str, ...]]:
    """Count the passed, failed and skipped tests of each file, and of all files."""
    counts: dict[str, Counter[str]] = {}
    for test in ElementTree.parse(report).iter("testcase"):
        children = {child.tag for child in test}
        outcome = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
        counts.setdefault(test.get("classname", ""), Counter())[outcome] += 1
    total = sum(counts.values(), Counter[str]())
    return [
        (name, *(str(count[outcome]) for outcome in ("passed", "failed", "skipped")))
        for name, count in [*sorted(counts.items()), ("all", total)]
    ]


def ratios(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return our time, its share of the matrix product, and the ratio of the best baseline for each workload."""
    rows = []
    for run in runs:
        product = run["gemm_flops_per_second"]
        for result in run["results"]:
            ours, *others = result["implementations"]
            baselines = [other for other in others if not other["name"].startswith("xformer")]
            flops = ours["flops_per_second"]
            share = f"{flops / product:.0%}" if flops and product else ""
            best = min(baselines, key=lambda other: other["seconds"], default=None)
            comparison = (best["name"], f"{best['ratio']:.2f}") if best else ("none", "")
            rows.append((result["workload"], f"{1e3 * ours['seconds']:.3f} ms", share, *comparison))
    return rows


def show(rows: list[tuple[str, ...]], path: Path) -> None:
    """Print a table and write it to a file."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
