"""The commands for a GPU say what is missing, keep to their time limit, and write what they have."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import time
import types

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


def test_the_operations_of_the_bandwidth_probe_are_valid_calls():
    probes, backend = importlib.import_module("gpu_probes"), Backend("numpy")
    names = []
    for name, run in probes.operations(backend, rows=64):
        if name != "embedding":  # its table does not depend on `rows`
            run()
        names.append(name)
    assert len(names) == len(set(names)) > 15
    assert probes.keeps_nan(backend) == "kept"


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


def test_every_case_describes_a_workload():
    cases = importlib.import_module("gpu_cases").CASES
    assert len({case.workload.name for case in cases}) == len(cases) > 10
    assert cases[0].workload.name.startswith("attention 4x16x4096x128 causal forward")
    assert all(case.specs[0].name == "xformer" and not case.specs[0].optional for case in cases)
