from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

from tests.bench.conftest import BENCH


def figures(name, seconds, ratio):
    return {
        "name": name,
        "seconds": seconds,
        "seconds_quartiles": [0.9 * seconds, 1.1 * seconds],
        "tokens_per_second": 100 / seconds,
        "flops_per_second": 1e9 / seconds,
        "peak_bytes": 2**21,
        "ratio": ratio,
        "ratio_quartiles": [ratio - 0.1, ratio + 0.1],
        "difference": None if name.startswith("xformer") else 0.125,
        "differs": not name.startswith("xformer"),
        "synchronous_seconds": None,
        "metadata": {},
    }


@pytest.fixture
def run():
    results = [
        {
            "workload": f"attention {length}",
            "sizes": {"batch": 2, "length": length, "causal": False},
            "rounds": 3,
            "implementations": [figures("xformer numpy", 0.01, 1.0), figures("torch", 0.025, 2.5)],
            "unavailable": {"baseline": "baseline failed: no compiler"},
        }
        for length in (16, 32)
    ]
    machine = {
        "processor": "Quick(R) CPU @ 3 GHz",
        "cores": 4,
        "threads": 2,
        "native": "avx2",
        "blas": "openblas",
        "python": "3.11",
        "versions": {"numpy": "2.4"},
        "load": 0.1,
    }
    return {
        "suite": "attention",
        "date": "2026-01-02",
        "machine": machine,
        "gemm_flops_per_second": 2e11,
        "results": results,
        "notes": ["the wheel has 1 kB"],
    }


def test_a_report_is_marked_for_the_page_of_benchmarks(run, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "attention.json").write_text(json.dumps(run))
    command = [sys.executable, str(BENCH / "report.py"), str(tmp_path / "runs"), "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    page = tmp_path / "2026-01-02-quick-r-cpu-3-ghz-2-threads.md"
    assert done.stdout.strip() == str(page)
    text = page.read_text()
    assert "Quick(R) CPU @ 3 GHz, 2 of 4 cores, openblas, native library avx2, Python 3.11, numpy 2.4, GEMM 200" in text
    assert "GFLOP/s, load 0.1" in text
    assert (
        "| attention 16 (3 rounds) | xformer numpy | 10.0 ms (9.00-11.0) | 10,000 | 100.0 | 50% | 2.0 MiB | 1.0" in text
    )
    row = "|  | torch (differs by 12.5%) | 25.0 ms (22.5-27.5) | 4,000 | 40.0 | 20% | 2.0 MiB | 2.50 (2.40-2.60) |"
    assert row in text
    assert text.count("- baseline failed: no compiler") == 1
    assert "- the wheel has 1 kB" in text
    assert "<!-- benchmarks: Attention | Attention, Quick(R) CPU @ 3 GHz, 2 threads -->\n| workload |" in text


def test_an_empty_directory_is_refused(tmp_path):
    report = importlib.import_module("report")
    with pytest.raises(SystemExit, match="contains no results"):
        report.write(tmp_path, tmp_path)
