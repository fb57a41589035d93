from __future__ import annotations

import importlib.util
import json
import re

import pytest

from xformer.benchmarks import interleaved, parts, run
from xformer.cli import bench
from xformer.errors import BackendError

TINY = ("--batch", "1", "--heads", "2", "--head-dim", "4", "--rounds", "2")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(interleaved, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(bench, "gemm_flops_per_second", lambda *arguments: 1e11)


def test_a_table_a_file_and_a_plot(xformer, tmp_path):
    out, plot = tmp_path / "new" / "speed.json", tmp_path / "speed.png"
    done = xformer("bench", "attention", *TINY, "--length", "3", "--length", "5", "--out", out, "--plot", plot)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "GEMM" in lines[0]
    assert [line for line in lines if line.startswith("attention")] == [
        f"attention 1x2x{length}x4 forward (2 rounds)" for length in (3, 5)
    ]
    assert sum(bool(re.search(r"xformer numpy .* ms .* MiB +1\.00 +1\.00-1\.00$", line)) for line in lines) == 2
    written = json.loads(out.read_text())
    assert (written["suite"], len(written["results"])) == ("attention", 2)
    assert written["machine"]["versions"]["numpy"]
    assert written["results"][1]["sizes"]["length"] == 5
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_libraries_are_compared_in_json(xformer):
    backends = ("--backend", "numpy", "--backend", "array_api_strict")
    done = xformer("bench", "attention", *TINY, "--length", "4", *backends, "--causal", "--json")
    assert (done.code, done.err) == (0, "")
    (result,) = json.loads(done.out)["results"]
    assert [each["name"] for each in result["implementations"]] == ["xformer numpy", "xformer array_api_strict"]
    assert result["sizes"]["causal"] is True


def test_growth_with_a_size_in_markdown(xformer, tmp_path):
    plot = tmp_path / "growth.png"
    options = ("--sweep", "length=16,64,256", "--peer", "textbook NumPy", "--markdown", "--plot", plot)
    done = xformer("bench", "attention", *TINY, *options)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert "| | numpy | textbook NumPy |" in lines
    assert sum(line.startswith("| attention 1x2x") for line in lines) == 3
    assert [line.partition(":")[0] for line in lines if "time grows as length^" in line] == [
        "- xformer numpy",
        "- textbook NumPy",
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_all_parts_in_one_run(xformer, tmp_path):
    sizes = ("--batch", "1", "--length", "4", "--heads", "2", "--head-dim", "4", "--layers", "1", "--vocabulary", "20")
    done = xformer("bench", "all", *sizes, "--rounds", "1", "--json", "--plot", tmp_path / "all.png")
    assert (done.code, done.err) == (0, "")
    assert [result["sizes"]["part"] for result in json.loads(done.out)["results"]] == [*parts.NAMES]


def test_a_workload_that_fails_keeps_the_results_of_the_others(xformer, monkeypatch):
    measure = run.interleaved_benchmark

    def fail_at_five(workload, *arguments):
        if workload.settings["length"] == 5:
            raise BackendError("xformer numpy failed: out of memory")
        return measure(workload, *arguments)

    monkeypatch.setattr(run, "interleaved_benchmark", fail_at_five)
    done = xformer("bench", "attention", *TINY, "--length", "3", "--length", "5")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-1] == "attention 1x2x5x4 forward: xformer numpy failed: out of memory"
    done = xformer("bench", "attention", *TINY, "--length", "5")
    assert (done.code, done.err) == (2, "error: xformer numpy failed: out of memory\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["atention"], "the suite is 'atention'; expected one of attention"),
        (["attention", "--backend", "numpy", "--backend", "numpy"], "--backend numpy is given twice"),
        (["attention", "--peer", "keras"], "--peer is 'keras'; expected one of torch.nn, textbook NumPy"),
        (["attention", "--sweep", "size=1,2"], "--sweep is 'size=1,2'; expected an axis and two or more sizes"),
        (["attention", "--sweep", "length=8"], "--sweep is 'length=8'; expected an axis and two or more sizes"),
        (["attention", "--batch", "0"], "--batch is 0; expected an integer of at least 1"),
        (["attention", "--rounds", "0"], "--rounds is 0; expected at least 1"),
        (["attention", "--threads", "1000000"], "--threads is 1000000; expected at most"),
        (["attention", "--out", "."], "cannot write .: it is a directory"),
        (["attention", "--plot", "/dev/null"], "--plot is /dev/null; expected a name ending in .png"),
        (["attention", "--out", "x.png", "--plot", "./x.png"], "--out and --plot are both x.png; expected two"),
    ],
)
def test_bad_input_is_refused_before_any_measurement(refused, monkeypatch, tmp_path, arguments, message):
    monkeypatch.setattr(interleaved.subprocess, "Popen", lambda *a, **k: pytest.fail("an implementation was started"))
    assert message in refused("bench", *arguments, untouched=tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="cupy is installed")
def test_a_library_that_is_missing_says_how_to_get_it(refused, tmp_path):
    error = refused("bench", "attention", "--backend", "cupy", untouched=tmp_path)
    assert 'run: pip install "array-transformers[cuda]"' in error
