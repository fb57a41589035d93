"""Everything that needs an NVIDIA GPU, in commands of less than ten minutes: `python bench/gpu.py COMMAND DIR`.

    check     whether there is a GPU; without DIR
    probe     questions that only a GPU can answer (gpu_probes.py), 3 minutes
    tests     all tests marked gpu, 9 minutes
    bench     xformer against torch (gpu_cases.py), 9 minutes

Each command first reports what is missing, or which library serves which operation, and prints a short table last,
even if the time limit (XFORMER_GPU_SECONDS) ends it early. Results go to DIR. Arguments after DIR select tests, as in
pytest; probes, by their names; or cases, by words of their names. README.md describes how to run it.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
ROOT = BENCH.parent
SECONDS = {"probe": 170.0, "tests": 470.0, "bench": 470.0}
ROUNDS, MIN_SECONDS = 5, 5.0  # of a case
# Import names and wheels of the requirements.
CORE = {
    "numpy": "numpy",
    "array_api_compat": "array-api-compat",
    "safetensors": "safetensors",
    "ml_dtypes": "ml_dtypes",
}
CUDA = {"cupy": "cupy-cuda13x", "cudnn": "nvidia-cudnn-frontend"}
REQUIRED = {
    "probe": {**CORE, **CUDA, "torch": "torch"},
    "tests": {**CORE, **CUDA, "pytest": "pytest", "hypothesis": "hypothesis"},
    "bench": {**CORE, **CUDA, "torch": "torch"},
}
_DEADLINE = "XFORMER_GPU_UNTIL"
# Preinstalled packages may use deprecated functions of each other.
DEPRECATIONS = [
    f"-Wdefault::{category}" for category in ("DeprecationWarning", "PendingDeprecationWarning", "FutureWarning")
]


def main(arguments: list[str]) -> int:
    """Run a command; return 0, the exit status of pytest, or 2 if the command cannot run here."""
    if arguments == ["check"]:
        return refuse(no_driver())
    if len(arguments) < 2 or arguments[0] not in SECONDS:
        received = " ".join(arguments) or "no arguments"
        return refuse(f"got {received}; expected {', '.join(SECONDS)}, and a directory for the results")
    command, folder = arguments[0], Path(arguments[1]).resolve()
    deadline = time.monotonic() + float(os.environ.get("XFORMER_GPU_SECONDS", SECONDS[command]))
    missing = missing_requirement(command)
    if folder.exists() and not folder.is_dir():
        missing = f"{folder} is a file; expected a directory for the results"
    if missing:
        return refuse(missing)
    folder.mkdir(parents=True, exist_ok=True)
    libraries = run_probe("libraries", 60.0)
    write(folder / "gpu-libraries.json", libraries)
    print(*lines_of("libraries", libraries), sep="\n", flush=True)
    reason = libraries.get("cuDNN does not serve")
    if command != "probe" and reason and not without_cudnn():
        return refuse(f"cuDNN does not serve attention ({reason}); set XFORMER_KERNELS=no-cudnn to run without it")
    if command == "bench" and "failed" in libraries:
        return refuse(f"a linear map and attention cannot be computed: {libraries['failed']}")
    run = {"probe": run_probes, "tests": run_tests, "bench": run_bench}[command]
    return run(folder, arguments[2:], deadline)


def refuse(reason: str | None) -> int:
    """Print the reason, if any, as an error; return the exit status."""
    if reason:
        print(f"error: {' '.join(reason.split())}", file=sys.stderr)
    return 2 if reason else 0


# --- Requirements -----------------------------------------------------------------------------------------------------


def missing_requirement(command: str) -> str | None:
    """Return why the command cannot run here and what to do about it, or None."""
    required = {name: wheel for name, wheel in REQUIRED[command].items() if name != "cudnn" or not without_cudnn()}
    wheels = [wheel for name, wheel in required.items() if importlib.util.find_spec(name) is None]
    if wheels:
        names = " ".join(wheels)
        return (
            f"missing packages: pip install {names}; without a network, bring the wheels: pip install --no-deps "
            f"--no-index --find-links WHEELS --target site {names}, and set PYTHONPATH=site"
        )
    return no_gpu()


def without_cudnn() -> bool:
    """Return whether the kernels of cuDNN are switched off."""
    return "no-cudnn" in os.environ.get("XFORMER_KERNELS", "")


def no_gpu() -> str | None:
    """Return why CuPy cannot be used, or None."""
    missing = no_driver()
    if missing is None:
        try:
            available = importlib.import_module("cupy").cuda.is_available()
        except (ImportError, OSError, RuntimeError) as error:
            return f"cupy cannot be imported: {error}"
        missing = None if available else "cupy finds no usable GPU; check the driver version with nvidia-smi"
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


# --- Probes -----------------------------------------------------------------------------------------------------------


def run_probes(folder: Path, names: Sequence[str], deadline: float) -> int:
    """Run every probe, or those named."""
    answers, lines = {}, []
    for name in names or [name for name in importlib.import_module("gpu_probes").PROBES if name != "libraries"]:
        start = time.monotonic()
        seconds = min(60.0, deadline - start)
        answers[name] = run_probe(name, seconds) if seconds > 5.0 else {"failed": "time limit reached"}
        write(folder / "gpu-probes.json", answers)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        lines += lines_of(name, answers[name])
    (folder / "gpu-probes.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("", *lines, sep="\n")
    return 1 if any("failed" in answer for answer in answers.values()) else 0


def run_probe(name: str, seconds: float) -> dict[str, Any]:
    """Run a probe in a process of its own, so that no failure affects the others; return its answers."""
    command = [sys.executable, str(BENCH / "gpu_probes.py"), name]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no answer in {seconds:.0f} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        errors = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return {"failed": errors[-1] if errors else f"exit status {done.returncode}", "stderr": done.stderr}
    return dict(json.loads(answers[-1]))


def lines_of(name: str, answers: dict[str, Any]) -> list[str]:
    """Return the answers of a probe as a short table."""
    lines = [f"{name}"]
    for question, answer in answers.items():
        if question == "stderr":
            continue
        first, *rest = str("; ".join(answer) or "none" if isinstance(answer, list) else answer).splitlines() or [""]
        lines += [f"  {question}: {first}", *(f"      {line}" for line in rest)]
    return lines


def environment() -> dict[str, str]:
    """Return the environment of child processes, which import from this directory and from the checkout."""
    path = os.pathsep.join(filter(None, (str(BENCH), str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


# --- Tests ------------------------------------------------------------------------------------------------------------


def run_tests(folder: Path, pytest_options: Sequence[str], deadline: float) -> int:
    """Run every test that needs the GPU."""
    report = folder / "gpu-tests.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "--no-header", "--tb=short", "--continue-on-collection-errors", f"--junitxml={report}"]
    if importlib.util.find_spec("xdist") is not None:
        options += ["-n", "4", "--dist", "loadfile"]  # compiling kernels takes longer than running them
    code = pytest(deadline, "tests", "-m", "gpu", *options, *pytest_options)
    if report.exists():
        rows, failures = outcomes(report)
        show([("file", "passed", "failed", "skipped"), *rows], folder / "gpu-tests.txt", failures)
    return code


def pytest(deadline: float, *arguments: str) -> int:
    """Run pytest with this file as a plugin; interrupt it 30 seconds after the deadline."""
    seconds = deadline - time.monotonic()
    variables = {**environment(), _DEADLINE: str(time.time() + seconds)}
    command = [sys.executable, "-m", "pytest", "-p", "gpu", *DEPRECATIONS, *arguments]
    with subprocess.Popen(command, cwd=ROOT, env=variables) as process:
        for timeout, signal_number in ((seconds + 30, signal.SIGINT), (15, signal.SIGTERM)):
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal_number)
        process.kill()
    return process.returncode


def pytest_runtest_setup(item: Any) -> None:
    """Skip all further tests once the time limit is reached (pytest hook)."""
    if time.time() > float(os.environ[_DEADLINE]):
        importlib.import_module("pytest").skip("time limit reached")


def outcomes(report: Path) -> tuple[list[tuple[str, ...]], list[str]]:
    """Count the passed, failed and skipped tests of each file, and of all files; return the failures, too."""
    counts: dict[str, Counter[str]] = {}
    failures = []
    for test in ElementTree.parse(report).iter("testcase"):
        children = {child.tag: child for child in test}
        failure = children.get("failure", children.get("error"))
        outcome = "failed" if failure is not None else "skipped" if "skipped" in children else "passed"
        counts.setdefault(test.get("classname", ""), Counter())[outcome] += 1
        if failure is not None:
            failures.append(f"{test.get('classname')}.{test.get('name')}: {failure.get('message', '')}"[:200])
    total = sum(counts.values(), Counter[str]())
    rows = [
        (name, *(str(count[outcome]) for outcome in ("passed", "failed", "skipped")))
        for name, count in [*sorted(counts.items()), ("all", total)]
    ]
    return rows, [" ".join(failure.split()) for failure in failures[:40]]


# --- Benchmarks -------------------------------------------------------------------------------------------------------


def run_bench(folder: Path, words: Sequence[str], deadline: float) -> int:
    """Measure the cases whose names contain all words; return 1 if a case failed."""
    sys.path[:0] = [str(BENCH), str(ROOT)]
    machine, report = (importlib.import_module(f"xformer.benchmarks.{name}") for name in ("machine", "report"))
    cases = importlib.import_module("gpu_cases").CASES
    gemm = None
    with contextlib.suppress(Exception), time_limit(40.0):
        gemm = machine.gemm_flops_per_second("cupy", None, "bfloat16")
    run = report.make_run("gpu", machine.describe_machine(), gemm)
    for case in cases:
        if not all(word in case.workload.name for word in words):
            continue
        try:
            run["results"].append(measure(case, deadline))
            print(*table(run)[-1], sep="  ", flush=True)
        except Exception as error:  # noqa: BLE001 - the other cases are still measured
            run["notes"].append(f"{case.workload.name}: {type(error).__name__}: {error}")
            print(run["notes"][-1], flush=True)
            with (folder / "errors.txt").open("a", encoding="utf-8") as file:
                print(run["notes"][-1], *getattr(error, "__notes__", []), sep="\n", file=file)
        write(folder / "gpu.json", run)
    show(table(run), folder / "gpu.txt", [*remarks(run), *run["notes"]])
    return 1 if run["notes"] else 0


def measure(case: Any, deadline: float) -> dict[str, Any]:
    """Measure a case in ROUNDS rounds, or fewer if time runs out."""
    seconds = min(case.seconds, deadline - time.monotonic())
    if seconds < MIN_SECONDS:
        raise TimeoutError("time limit reached")
    last_round = time.monotonic() + 0.8 * seconds
    benchmark = importlib.import_module("xformer.benchmarks.interleaved").interleaved_benchmark
    with time_limit(seconds), benchmark(case.workload, case.specs, start_together=True) as running:
        while running.rounds < ROUNDS and (not running.rounds or time.monotonic() < last_round):
            running.run_round()
        result: dict[str, Any] = running.result()
    return {**result, "estimate": case.estimate, "moved": case.moved}


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after this time."""

    def expire(*_: Any) -> None:
        raise TimeoutError(f"no result in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def table(run: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return our time, that of one step with its wait, the rate, and the fastest baseline, for each workload."""
    rows = [("case", "xformer", "one step", "rate", "fastest baseline", "time", "ratio", "estimate")]
    for result in run["results"]:
        ours, *others = result["implementations"]
        baselines = [other for other in others if not other["name"].startswith("xformer")]
        best = min(baselines, key=lambda other: other["seconds"], default=None)
        theirs = (best["name"], milliseconds(best["seconds"]), f"{best['ratio']:.2f}") if best else ("none", "", "")
        times = milliseconds(ours["seconds"]), milliseconds(ours["synchronous_seconds"])
        rows.append((result["workload"], *times, rate(result, ours), *theirs, result["estimate"]))
    return rows


def milliseconds(seconds: float | None) -> str:
    """Format a time; None is empty."""
    return "" if seconds is None else f"{1e3 * seconds:.3f} ms"


def rate(result: dict[str, Any], implementation: dict[str, Any]) -> str:
    """Return operations per second, or the share of the memory bandwidth, of an implementation."""
    if result["moved"]:
        bandwidth = importlib.import_module("gpu_probes").BYTES_PER_SECOND
        return f"{result['moved'] / implementation['seconds'] / bandwidth:.0%} of {bandwidth / 1e12:.1f} TB/s"
    flops = implementation["flops_per_second"]
    return f"{flops / 1e12:.0f} TFLOP/s" if flops else ""


def remarks(run: dict[str, Any]) -> list[str]:
    """Return what else a reader must know: different results, warnings, missing implementations, all other times."""
    lines = []
    for result in run["results"]:
        for each in result["implementations"]:
            line = f"{result['workload']}: {each['name']} {milliseconds(each['seconds'])}"
            if each["differs"]:
                lines.append(f"{line}, DIFFERS from the first by {each['difference']:.1%}")
            lines += [f"{line}, warning: {text}" for text in each["metadata"].get("warnings", [])]
            if each["name"] == "xformer, deterministic":
                lines.append(line)
        lines += [f"{result['workload']}: {reason}" for reason in result["unavailable"].values()]
    return lines


# --- Output -----------------------------------------------------------------------------------------------------------


def write(path: Path, value: Any) -> None:
    """Write JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def show(rows: Sequence[tuple[str, ...]], path: Path, remarks: Sequence[str] = ()) -> None:
    """Print a table and remarks, and write them to a file."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    path.write_text("\n".join([*lines, *remarks]) + "\n", encoding="utf-8")
    print("", *lines, *remarks, sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
