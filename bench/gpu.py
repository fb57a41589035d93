"""What a machine with a GPU is asked: `python bench/gpu.py tests DIR`, `python bench/gpu.py bench DIR`.

Needs what `pip install -e '.[cli,cuda,cudnn]' pytest pytest-benchmark hypothesis` brings, and for `bench` torch; where
they are, nothing is downloaded. Everything goes to DIR; what matters is printed last, in a short table, also where the
time (XFORMER_GPU_SECONDS, by default 500) ends before the work does. Arguments after DIR are handed to pytest.
`python bench/gpu.py check` needs none of that and reports whether there is a GPU.
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
_UNTIL = "XFORMER_GPU_UNTIL"
# No test is to fail of what packages that the machine came with find old about each other.
OLD = [f"-Wdefault::{kind}" for kind in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")]


def main(arguments: list[str]) -> int:
    """Run the tests or the benchmarks; the exit status is pytest's, 2 where there is nothing to run on."""
    if arguments == ["check"]:
        return refuse(no_driver())
    if len(arguments) < 2 or arguments[0] not in ("tests", "bench"):
        given = " ".join(arguments) or "no arguments"
        return refuse(f"got {given}; expected tests or bench, then a folder for the results")
    what, folder, rest = arguments[0], Path(arguments[1]), arguments[2:]
    missing = why_not(what)
    if folder.exists() and not folder.is_dir():
        missing = f"{folder} is a file; expected a folder for the results"
    if missing:
        return refuse(missing)
    folder.mkdir(parents=True, exist_ok=True)
    return (run_tests if what == "tests" else run_bench)(folder.resolve(), rest)


def refuse(reason: str | None) -> int:
    """Print why nothing is done; returns the exit status, 0 where there is no reason."""
    if reason:
        print(f"error: {reason}", file=sys.stderr)
    return 2 if reason else 0


def why_not(what: str) -> str | None:
    """Why nothing can run here, and how to mend it."""
    needed = {"tests": ("cupy", "pytest", "hypothesis"), "bench": ("cupy", "pytest", "pytest_benchmark", "torch")}
    absent = [name for name in needed[what] if importlib.util.find_spec(name) is None]
    if absent:
        packages = "'.[cli,cuda,cudnn]' pytest pytest-benchmark hypothesis" + (" torch" if what == "bench" else "")
        return f"{' and '.join(absent)} cannot be imported; run: pip install {packages}"
    return no_gpu()


def no_gpu() -> str | None:
    """Why CuPy cannot compute here."""
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed"
    missing = no_driver()
    if missing is None and not importlib.import_module("cupy").cuda.is_available():
        missing = "cupy finds no GPU that it can use; look at nvidia-smi for the driver's version"
    return missing


def no_driver() -> str | None:
    """Why there is no GPU for anybody, from the driver itself."""
    count = ctypes.c_int()
    try:
        cuda = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return "no driver for NVIDIA GPUs is installed; expected a machine with such a GPU"
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return "the driver finds no NVIDIA GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"
    return None


def run_tests(folder: Path, rest: list[str]) -> int:
    """Every test that computes on the GPU."""
    report = folder / "gpu-tests.xml"
    report.unlink(missing_ok=True)
    told = "-q", "--no-header", "--tb=short", "--continue-on-collection-errors", f"--junitxml={report}"
    code = pytest("tests", "-m", "gpu", *told, *rest)
    if report.exists():
        rows = outcomes(report)
        show([("file", "passed", "failed", "skipped"), *rows], folder / "gpu-tests.txt")
    return code


def run_bench(folder: Path, rest: list[str]) -> int:
    """Every benchmark against torch on the GPU."""
    code = pytest("bench/bench_gpu.py", "-q", "-s", "--benchmark-only", f"--results={folder}", *rest)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    show([("case", "time", "of GEMM", "best peer", "ratio"), *ratios(runs)], folder / "gpu-bench.txt")
    return code


def pytest(*arguments: str) -> int:
    """Run pytest, with this file as a plugin; what does not heed the time is ended a minute later."""
    seconds = float(os.environ.get("XFORMER_GPU_SECONDS", "500"))
    path = os.pathsep.join(filter(None, (str(ROOT / "bench"), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, _UNTIL: str(time.time() + seconds)}
    command = [sys.executable, "-m", "pytest", "-p", "gpu", *OLD, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        for patience, last in ((seconds + 60, signal.SIGINT), (15, signal.SIGTERM)):
            try:
                return process.wait(patience)
            except subprocess.TimeoutExpired:
                process.send_signal(last)
        process.kill()
    return process.returncode


def pytest_runtest_teardown(item: Any) -> None:
    """For pytest: once the time is over, no further test begins, and what was found is reported."""
    if time.time() > float(os.environ[_UNTIL]):
        item.session.shouldstop = "the time is over"


def outcomes(report: Path) -> list[tuple[str, ...]]:
    """Of each test file, how many passed, failed and were skipped, and of all together."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        children = {child.tag for child in case}
        outcome = "failed" if children & {"failure", "error"} else "skipped" if "skipped" in children else "passed"
        counts.setdefault(case.get("classname", ""), Counter())[outcome] += 1
    total = sum(counts.values(), Counter[str]())
    return [
        (name, *(str(count[outcome]) for outcome in ("passed", "failed", "skipped")))
        for name, count in [*sorted(counts.items()), ("all", total)]
    ]


def ratios(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Of each case, our time, its share of the fastest matrix product, and the best peer's ratio."""
    rows = []
    for run in runs:
        product = run["gemm_flops_per_second"]
        for result in run["results"]:
            ours, *others = result["contenders"]
            peers = [other for other in others if not other["name"].startswith("xformer")]
            flops = ours["flops_per_second"]
            share = f"{flops / product:.0%}" if flops and product else ""
            best = min(peers, key=lambda peer: peer["seconds"], default=None)
            beside = (best["name"], f"{best['ratio']:.2f}") if best else ("none", "")
            rows.append((result["case"], f"{1e3 * ours['seconds']:.3f} ms", share, *beside))
    return rows


def show(rows: list[tuple[str, ...]], path: Path) -> None:
    """Print a table, and write it."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
