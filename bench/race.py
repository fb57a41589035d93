"""What the benchmarks of this folder share: races as pytest-benchmark tests, and their results in files.

The mechanism, contenders that take turns, is that of `xformer bench` (xformer/benchmarks/interleaved.py); here other
libraries take part.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from xformer.benchmarks import Case, Entry, describe_machine, gemm_flops_per_second, make_run, racing, table
from xformer.benchmarks.report import machine_line
from xformer.io import write_json

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))  # contenders import `peers` and `baselines` from here


class Recorder:
    """Runs races inside pytest-benchmark, and writes the results of each benchmark file as one run.

    folder: where to; None writes nothing. most_turns: of a race. The machine is described, and its matrix product
    measured, once, before the first race.
    """

    def __init__(self, folder: Path | None, *, most_turns: int | None) -> None:
        self.folder, self._most_turns = folder, most_turns
        self.product: tuple[Any, ...] = ("numpy",)  # whose matrix product is the measure: backend, threads, dtype
        self._runs: dict[str, dict[str, Any]] = {}
        self._common: tuple[dict[str, Any], float] | None = None

    def race(self, benchmark: Any, work: str, case: Case, entries: Sequence[Entry], turns: int) -> dict[str, Any]:
        """Race; pytest-benchmark's own figures are whole turns. Returns the result of the race."""
        run = self._run(work)
        on_gpu = self.product[0] == "cupy"  # where they do not take the processor from each other
        with racing(case, entries, together=on_gpu) as running:
            benchmark.pedantic(running.turn, rounds=min(turns, self._most_turns or turns))
            result = running.result()
        benchmark.extra_info.update(result)
        run["results"].append(result)
        self._write(run)
        print("", machine_line(run), *table({**run, "results": [result], "notes": []}), sep="\n")
        return result

    def note(self, work: str, text: str) -> None:
        """Add a line to a run, for what is no race."""
        run = self._run(work)
        run["notes"].append(text)
        self._write(run)
        print("", text, sep="\n")

    def _run(self, work: str) -> dict[str, Any]:
        if self._common is None:
            self._common = describe_machine(), gemm_flops_per_second(*self.product)
        return self._runs.setdefault(work, make_run(work, *self._common))

    def _write(self, run: dict[str, Any]) -> None:
        if self.folder is not None:
            write_json(self.folder / f"{run['work']}.json", run)


def xformer(factory: str, backends: Sequence[str] = ("numpy", "torch", "jax", "cupy")) -> list[Entry]:
    """xformer on each library, on NumPy also without compiled kernels; those beside the first need not be there."""
    entries = [
        Entry(f"xformer {name}", factory, {"backend": name}, optional=place > 0) for place, name in enumerate(backends)
    ]
    if importlib.util.find_spec("numba") is not None and backends[0] == "numpy":
        plain = {"XFORMER_KERNELS": "no-jit"}
        entries.insert(1, replace(entries[0], name="xformer numpy, uncompiled", environment=plain))
    return entries


def peer(name: str, factory: str, *, checked: bool = True, **settings: Any) -> Entry:
    """Another library, where it is installed."""
    return Entry(name, factory, settings, optional=True, checked=checked)
