"""The commands for a GPU say what is missing, keep to their time limit, and write what they have."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import time
import types

import numpy as np
import pytest

from tests.bench.conftest import BENCH
from xformer.benchmarks import interleaved, machine
from xformer.benchmarks.computation import Backend
from xformer.benchmarks.interleaved import Spec, Workload


@pytest.fixture
def gpu():
    return importlib.import_module("gpu")


def driver(devices, status=0):
    """Return a fake driver library with this number of devices."""

    def count(pointer):
        pointer._obj.value = devices
        return 0

    return types.SimpleNamespace(cuInit=lambda flags: status, cuDeviceGetCount=count)


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (None, "no NVIDIA driver is installed; expected a machine with an NVIDIA GPU"),
        (driver(0), "the driver finds no NVIDIA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (driver(1, status=100), "the driver finds no NVIDIA GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_machine_without_a_gpu_is_refused_in_one_line(gpu, monkeypatch, capsys, library, message):
    def load(name):
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    assert gpu.main(["check"]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_a_machine_with_a_gpu_is_accepted(gpu, monkeypatch, capsys):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver(1))
    assert gpu.main(["check"]) == 0
    assert capsys.readouterr() == ("", "")


def test_nox_checks_before_it_installs():
    session = (BENCH.parent / "noxfile.py").read_text().split("def run_on_gpu")[1].split("\ndef ")[0]
    assert 0 < session.index('"check"') < session.index("session.install")


@pytest.mark.parametrize("command", ["probe", "tests", "bench"])
def test_missing_wheels_are_named_in_one_line(gpu, monkeypatch, capsys, tmp_path, command):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("array_api_compat", "cudnn") else object()
    )
    assert gpu.main([command, str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: missing packages: pip install array-api-compat nvidia-cudnn-frontend; ")
    assert "--target site array-api-compat nvidia-cudnn-frontend, and set PYTHONPATH=site" in error
    assert (error.count("\n"), (tmp_path / "out").exists()) == (1, False)


def test_cupy_without_its_libraries_is_refused_in_one_line(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu, "no_driver", lambda: None)

    def fail(name):
        raise ImportError("libcudart.so.13:\ncannot open shared object file")

    monkeypatch.setattr(gpu.importlib, "import_module", fail)
    assert gpu.main(["tests", str(tmp_path)]) == 2
    error = "error: cupy cannot be imported: libcudart.so.13: cannot open shared object file\n"
    assert capsys.readouterr().err == error


def serve(gpu, monkeypatch, **answers):
    """Let the probe of the libraries answer this, and the commands print their names."""
    monkeypatch.setattr(gpu, "missing_requirement", lambda command: None)
    monkeypatch.setattr(gpu, "run_probe", lambda name, seconds: {"attention": "cudnn.attention\n  not x", **answers})
    for command in ("probes", "tests", "bench"):
        monkeypatch.setattr(gpu, f"run_{command}", lambda *arguments, command=command: print(command))


def test_the_libraries_are_reported_first_and_cudnn_must_serve(gpu, monkeypatch, capsys, tmp_path):
    serve(gpu, monkeypatch)
    gpu.main(["bench", str(tmp_path)])
    assert capsys.readouterr().out == "libraries\n  attention: cudnn.attention\n        not x\nbench\n"
    reason = {"cuDNN does not serve": "libcudnn.so.9 is missing"}
    serve(gpu, monkeypatch, **reason)
    for command in ("tests", "bench"):
        assert gpu.main([command, str(tmp_path)]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("error: cuDNN does not serve attention (libcudnn.so.9 is missing); ")
        assert command not in captured.out
    gpu.main(["probe", str(tmp_path)])
    monkeypatch.setenv("XFORMER_KERNELS", "no-cudnn")
    gpu.main(["bench", str(tmp_path)])
    assert [line for line in capsys.readouterr().out.splitlines() if line in ("probes", "bench")] == ["probes", "bench"]
    assert json.loads((tmp_path / "gpu-libraries.json").read_text())["cuDNN does not serve"]


def test_a_probe_that_fails_does_not_affect_the_others(gpu, monkeypatch, capsys, tmp_path):
    (tmp_path / "gpu_probes.py").write_text(
        "import json, os, sys, time\n"
        "if sys.argv[1] == 'crash': os.abort()\n"
        "if sys.argv[1] == 'hang': time.sleep(60)\n"
        "if sys.argv[1] == 'fail': raise RuntimeError('CUBLAS_STATUS_INTERNAL_ERROR')\n"
        "print(json.dumps({'rate': '4 TB/s', 'warnings': []}))\nprint('profiler stopped')\n"
    )
    monkeypatch.setattr(gpu, "BENCH", tmp_path)
    assert gpu.run_probe("hang", 0.5) == {"failed": "no answer in 0 s"}
    assert gpu.run_probes(tmp_path, ["crash", "fail", "copy"], time.monotonic() + 60.0) == 1
    lines = capsys.readouterr().out.splitlines()[-7:]
    assert lines[:4] == [
        "crash",
        "  failed: exit status -6",
        "fail",
        "  failed: RuntimeError: CUBLAS_STATUS_INTERNAL_ERROR",
    ]
    assert lines[4:] == ["copy", "  rate: 4 TB/s", "  warnings: none"]
    assert json.loads((tmp_path / "gpu-probes.json").read_text())["copy"]["rate"] == "4 TB/s"
    assert gpu.run_probes(tmp_path, ["copy"], time.monotonic()) == 1
    assert "time limit reached" in capsys.readouterr().out


def test_the_operations_of_the_bandwidth_probe_are_valid_calls():
    probes, backend = importlib.import_module("gpu_probes"), Backend("numpy")
    names = []
    for name, run in probes.operations(backend, rows=64):
        if name != "embedding":  # its table does not depend on `rows`
            run()
        names.append(name)
    assert len(names) == len(set(names)) > 15
    assert probes.keeps_nan(backend) == "kept"


def test_bytes_are_those_that_a_kernel_must_move():
    moved = importlib.import_module("gpu_probes").bytes_moved
    x, weight, ids = np.zeros((8, 16), "float16"), np.zeros(16, "float16"), np.zeros(8, "int64")
    table = np.zeros(1, [("sizes", np.int64, 3)])
    table["sizes"][0, :2] = 100, 28
    assert moved("norms.normalize", ("float16",), (x, weight, None, x, 8, 16, 1e-5)) == 2 * 256 + 32
    assert moved("columns.add_bias", ("float16",), (x, weight, 128, 16)) == 2 * 256 + 32
    assert moved("embedding.gather", ("float16",), (np.zeros((1000, 16)), ids, x, 8, 1000, 16)) == 2 * 256 + 64
    assert moved("optimizer.adam", ("float32", "float32"), (table, 64, 0.1, None)) == 128 * 28
    assert moved("optimizer.cast", ("float32", "bfloat16"), (table, 64)) == 128 * 6


def sleeper(name, seconds, **settings):
    return Spec(name, "stub_computations:sleep", {"seconds": [seconds], "result": [[1.0]], "waits": True, **settings})


@pytest.fixture
def cases(gpu, monkeypatch):
    """Let `bench` measure other cases; they have a list of (name, settings of Case, implementations)."""
    monkeypatch.syspath_prepend(str(BENCH.parent / "tests" / "benchmarks"))
    monkeypatch.setattr(interleaved, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(machine, "gemm_flops_per_second", lambda *arguments: 1e12)
    gpu_cases = importlib.import_module("gpu_cases")

    def set_cases(*cases):
        made = [
            gpu_cases.Case(Workload(name, {}, (1,), flops=10**9, warmup_steps=0), specs, **settings)
            for name, settings, *specs in cases
        ]
        monkeypatch.setattr(gpu_cases, "CASES", made)

    return set_cases


def test_the_results_so_far_are_written_when_a_case_fails_or_takes_too_long(gpu, cases, monkeypatch, capsys, tmp_path):
    ours, theirs = sleeper("xformer", 0.002), sleeper("torch", 0.004)
    monkeypatch.setattr(gpu, "MIN_SECONDS", 0.0)
    cases(
        ("stuck", {"seconds": 0.5}, sleeper("xformer", 60.0)),
        ("broken", {}, Spec("xformer", "stub_computations:fail")),
        ("norm", {"estimate": "45%", "moved": 8_000_000}, ours, theirs, sleeper("flash", 0.001, result=[[0.0]])),
    )
    assert gpu.run_bench(tmp_path, [], time.monotonic() + 60.0) == 1
    run = json.loads((tmp_path / "gpu.json").read_text())
    assert run["notes"] == [
        "stuck: TimeoutError: no result in 0 s",
        "broken: BackendError: xformer failed: RuntimeError: no compiler",
    ]
    (result,) = run["results"]
    assert (result["workload"], result["rounds"]) == ("norm", gpu.ROUNDS)
    *_, head, row, difference, stuck, broken = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "case"
    assert row.split()[0] == "norm"
    assert row.endswith("45%")
    assert "norm: flash " in difference
    assert difference.endswith("DIFFERS from the first by 100.0%")
    assert [stuck, broken] == run["notes"]
    assert (tmp_path / "gpu.txt").read_text().splitlines()[0] == head
    assert "Traceback" in (tmp_path / "errors.txt").read_text()
    assert gpu.run_bench(tmp_path, ["nor"], time.monotonic() - 1.0) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "norm: TimeoutError: time limit reached"


def test_the_table_has_the_fastest_baseline_and_the_estimate(gpu):
    def measured(name, seconds, **others):
        rates = {"flops_per_second": 1e9 / seconds, "synchronous_seconds": seconds + 1e-4, "ratio": seconds / 1e-3}
        return {"name": name, "seconds": seconds, "differs": False, "metadata": {}, **rates, **others}

    implementations = [
        measured("xformer", 1e-3),
        measured("xformer, deterministic", 9e-4, metadata={"warnings": ["a slower kernel runs instead"]}),
        measured("torch cudnn", 9.5e-4),
        measured("torch flash", 2e-3, differs=True, difference=0.5),
    ]
    result = {"workload": "attention", "moved": 0, "estimate": "ratio 0.95", "implementations": implementations}
    run = {"results": [{**result, "unavailable": {"torch": "torch failed: no compiler"}}]}
    row = "attention", "1.000 ms", "1.100 ms", "1 TFLOP/s", "torch cudnn", "0.950 ms", "0.95", "ratio 0.95"
    assert gpu.table(run)[1] == row
    assert gpu.rate({"moved": 2_150_000_000}, {"seconds": 1e-3}) == "50% of 4.3 TB/s"
    assert gpu.remarks(run) == [
        "attention: xformer, deterministic 0.900 ms, warning: a slower kernel runs instead",
        "attention: xformer, deterministic 0.900 ms",
        "attention: torch flash 2.000 ms, DIFFERS from the first by 50.0%",
        "attention: torch failed: no compiler",
    ]


def test_every_case_describes_a_workload():
    cases = importlib.import_module("gpu_cases").CASES
    assert len({case.workload.name for case in cases}) == len(cases) > 10
    assert cases[0].workload.name.startswith("attention 4x16x4096x128 causal forward")
    assert all(case.specs[0].name == "xformer" and not case.specs[0].optional for case in cases)


def test_results_so_far_are_reported_when_the_time_limit_is_reached(gpu, tmp_path):
    (tmp_path / "test_two.py").write_text("def test_one(): pass\ndef test_other(): assert 0\n")
    (tmp_path / "test_broken.py").write_text("import a_missing_module\n")
    report = tmp_path / "report.xml"
    options = "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}"
    assert gpu.pytest(time.monotonic() + 30.0, str(tmp_path), *options) == 1
    rows, failures = gpu.outcomes(report)
    assert rows[-1] == ("all", "1", "2", "0")
    assert any("test_two.test_other: assert 0" in failure for failure in failures)


def test_tests_are_skipped_once_the_time_limit_is_reached(gpu, monkeypatch):
    monkeypatch.setenv("XFORMER_GPU_UNTIL", str(time.time() + 60.0))
    gpu.pytest_runtest_setup(None)
    monkeypatch.setenv("XFORMER_GPU_UNTIL", str(time.time() - 1.0))
    with pytest.raises(pytest.skip.Exception, match="time limit reached"):
        gpu.pytest_runtest_setup(None)
