"""Shared by the benchmarks of this directory: interleaved benchmarks as pytest-benchmark tests that write JSON files.

The mechanism is that of `xformer bench` (xformer/benchmarks/interleaved.py); here other libraries take part.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xformer import native
from xformer.benchmarks.interleaved import Spec, Workload, interleaved_benchmark
from xformer.benchmarks.machine import describe_machine, gemm_flops_per_second
from xformer.benchmarks.report import format_table, machine_line, make_run
from xformer.io import write_json

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))  # implementations import `baselines` and `workloads`


class Recorder:
    """Runs interleaved benchmarks inside pytest-benchmark and writes the results of each suite to a file.

    The machine is described, and its matrix product measured, once before the first benchmark.

    Args:
        folder: Directory for the files; None writes nothing.
        max_rounds: Limit of the rounds of each benchmark.
    """

    def __init__(self, folder: Path | None, *, max_rounds: int | None) -> None:
        self.folder, self._max_rounds = folder, max_rounds
        self._runs: dict[str, dict[str, Any]] = {}
        self._machine: tuple[dict[str, Any], float] | None = None

    def measure(self, benchmark: Any, suite: str, workload: Workload, specs: Sequence[Spec], rounds: int) -> Any:
        """Run an interleaved benchmark and return its result; pytest-benchmark's own times are those of rounds."""
        run = self._run(suite)
        with interleaved_benchmark(workload, specs) as interleaved:
            benchmark.pedantic(interleaved.run_round, rounds=min(rounds, self._max_rounds or rounds))
            result = interleaved.result()
        benchmark.extra_info.update(result)
        run["results"].append(result)
        self._write(run)
        print("", machine_line(run), *format_table({**run, "results": [result], "notes": []}), sep="\n")
        return result

    def note(self, suite: str, text: str) -> None:
        """Add a line to the report of a suite."""
        run = self._run(suite)
        run["notes"].append(text)
        self._write(run)
        print("", text, sep="\n")

    def _run(self, suite: str) -> dict[str, Any]:
        if self._machine is None:
            self._machine = describe_machine(), gemm_flops_per_second("numpy")
        return self._runs.setdefault(suite, make_run(suite, *self._machine))

    def _write(self, run: dict[str, Any]) -> None:
        if self.folder is not None:
            write_json(self.folder / f"{run['suite']}.json", run)


def xformer_specs(factory: str, backends: Sequence[str] = ("numpy", "torch", "jax", "cupy")) -> list[Spec]:
    """Return xformer on each library, and on NumPy without native kernels; only the first library is required."""
    specs = [
        Spec(f"xformer {name}", factory, {"backend": name}, optional=index > 0) for index, name in enumerate(backends)
    ]
    if native.is_available() and backends[0] == "numpy":
        no_native = {"XFORMER_KERNELS": "no-native"}
        specs.insert(1, replace(specs[0], name="xformer numpy, no-native", environment=no_native))
    return specs


def baseline(name: str, factory: str, **settings: Any) -> Spec:
    """Return an implementation by another library, which need not be installed."""
    return Spec(name, factory, settings, optional=True)
