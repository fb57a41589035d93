"""Two contenders in turn, and a table of who was faster.

Times drift with whatever else the machine does, ratios of neighbouring measurements much less: so the two sides take
turns, and what counts is the median of the ratios.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PAUSE_SECONDS = 0.3  # longer than idle threads of the other side spin before they sleep
_WARM_UP = 3


class Contender:
    """One side, in a process of its own (contenders.py)."""

    def __init__(self, side: str, spec_path: Path) -> None:
        command = [sys.executable, str(Path(__file__).with_name("contenders.py")), side, str(spec_path)]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.parameters = int(self._line())

    def step(self, number: int) -> float:
        """Take the step on batch `number`; returns its seconds."""
        time.sleep(_PAUSE_SECONDS)
        print(number, file=self.process.stdin, flush=True)
        return float(self._line())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def _line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a contender ended with code {self.process.wait()}")
        return line


class Race:
    """xformer against torch on the batches of a specification, step by step."""

    def __init__(self, spec_path: Path, tokens: list[int]) -> None:
        self.ours, self.theirs = Contender("xformer", spec_path), Contender("torch", spec_path)
        self.tokens = tokens  # target tokens of each batch
        self.times: list[tuple[float, float]] = []
        self._number = 0
        for _ in range(_WARM_UP):
            self.turn()
        self.times.clear()

    def turn(self) -> tuple[float, float]:
        """One batch for both, whoever had the second place now first; returns the seconds of xformer and torch."""
        order = (self.ours, self.theirs) if self._number % 2 else (self.theirs, self.ours)
        found = {side: side.step(self._number) for side in order}
        self._number += 1
        self.times.append((found[self.ours], found[self.theirs]))
        return self.times[-1]

    def summary(self) -> dict[str, Any]:
        """Median seconds, tokens a second of both, and how much faster xformer is (above 1: faster)."""
        ours, theirs = zip(*self.times, strict=True)
        ratios = sorted(b / a for a, b in self.times)
        first = self._number - len(self.times)
        tokens = sum(self.tokens[(first + turn) % len(self.tokens)] for turn in range(len(self.times)))
        return {
            "turns": len(ratios),
            "xformer_ms": 1e3 * statistics.median(ours),
            "torch_ms": 1e3 * statistics.median(theirs),
            "xformer_tokens_per_second": tokens / sum(ours),
            "torch_tokens_per_second": tokens / sum(theirs),
            "ratio": statistics.median(ratios),
            "lowest_ratio": ratios[0],
            "highest_ratio": ratios[-1],
            "parameters": [self.ours.parameters, self.theirs.parameters],
        }


@contextlib.contextmanager
def race(spec: dict[str, Any]) -> Iterator[Race]:
    """Start both sides on a specification, and end them."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        tokens = spec.get("tokens") or [sum(len(spec["target"][row]) + 1 for row in rows) for rows in spec["batches"]]
        running = Race(path, tokens)
        stack.callback(running.ours.close)
        stack.callback(running.theirs.close)
        yield running


def turns(program: str, usual: int) -> int:
    """The number of turns that the command line of a benchmark asks for; --help prints what the program is about."""
    parser = argparse.ArgumentParser(description=program, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=positive, default=usual, help=f"how often to measure (default {usual})")
    return int(parser.parse_args().turns)


def positive(text: str) -> int:
    """A number of turns on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number of at least 1")
    return int(text)


def run(benchmark: Any, spec: dict[str, Any], turns: int) -> None:
    """Race inside pytest-benchmark: its figures are xformer's steps, with torch's turns between them."""
    with race(spec) as running:
        benchmark.pedantic(running.turn, rounds=turns)
        benchmark.extra_info.update(running.summary(), machine=machine())
        print(f"\n{machine()}\n{table({benchmark.name: running.summary()})}")


def table(rows: dict[str, dict[str, Any]]) -> str:
    """One line for each race."""
    lines = [f"{'':32}{'xformer':>20}{'torch':>20}{'ratio':>8}  spread of the ratio"]
    for name, row in rows.items():
        ours, theirs = (
            f"{row[f'{side}_ms']:.0f} ms {row[f'{side}_tokens_per_second']:.0f}/s" for side in ("xformer", "torch")
        )
        spread = f"{row['lowest_ratio']:.2f} to {row['highest_ratio']:.2f} in {row['turns']} turns"
        lines.append(f"{name:32}{ours:>20}{theirs:>20}{row['ratio']:>8.2f}  {spread}")
    return "\n".join(lines)


def machine() -> str:
    """What figures belong to: processor, cores, BLAS, versions."""
    import numpy  # noqa: F401 - loads the BLAS that is asked about
    from threadpoolctl import threadpool_info

    blas = {f"{pool['internal_api']} {pool['version']} ({pool.get('architecture')})" for pool in threadpool_info()}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "torch") if _installed(name)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parts = [_processor(), f"{cores} cores", *sorted(blas), f"Python {platform.python_version()}", *versions]
    return ", ".join([*parts, f"load {os.getloadavg()[0]:.1f}"])


def _installed(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
