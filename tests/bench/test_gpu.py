"""The driver is asked for a GPU before anything is installed."""

from __future__ import annotations

import ctypes
import importlib
import types

import pytest

from tests.bench.conftest import BENCH


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


def test_results_so_far_are_reported_when_the_time_limit_is_reached(gpu, monkeypatch, tmp_path):
    (tmp_path / "test_two.py").write_text("def test_one(): pass\ndef test_other(): pass\n")
    (tmp_path / "test_broken.py").write_text("import a_missing_module\n")
    report = tmp_path / "report.xml"
    options = "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors", f"--junitxml={report}"
    monkeypatch.setenv("XFORMER_GPU_SECONDS", "0")
    assert gpu.pytest(str(tmp_path), *options) == 2
    *_, (name, *counts) = gpu.outcomes(report)
    assert (name, *counts) == ("all", "1", "1", "0")
