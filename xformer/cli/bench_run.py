"""Implementation of `xformer bench`: check the arguments, measure, print, write, plot."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xformer.backends import dtype_named, resolve
from xformer.benchmarks import (
    SUITES,
    Suite,
    Workload,
    backend_specs,
    describe_machine,
    format_table,
    gemm_flops_per_second,
    interleaved_benchmark,
    make_run,
)
from xformer.benchmarks.interleaved import DTYPES, dtype_of
from xformer.benchmarks.report import machine_line
from xformer.benchmarks.suites import AXES
from xformer.cli._console import make_console
from xformer.cli._plots import check_plot
from xformer.errors import BackendError, ConfigError
from xformer.io import unwritable_parent, write_json
from xformer.text.extras import require
from xformer.threads import num_threads


@dataclass(frozen=True)
class BenchArgs:
    """Arguments of `xformer bench`.

    Attributes:
        suite: Name of a suite.
        backends: Array libraries; the first one is the reference.
        sizes: Fields of `xformer.benchmarks.Sizes` that replace the defaults of the suite.
        rounds: Number of rounds; None is the default of the suite.
        threads: Threads of each library; None is all that this process may use.
        quick: Use one size and three rounds by default.
    """

    suite: str
    backends: tuple[str, ...]
    sizes: dict[str, Any]
    rounds: int | None
    threads: int | None
    quick: bool = False


def run_bench(args: BenchArgs, *, out: Path | None, plot: Path | None, as_json: bool) -> None:
    """Measure and show the results.

    Raises:
        ConfigError: If an argument or an output path is invalid; raised before anything is measured.
        BackendError: If a library is not installed or cannot start.
    """
    suite = _checked_suite(args)
    workloads = suite.workloads(dataclasses.replace(suite.sizes, **args.sizes))
    for path in (out, plot):
        if path is not None:
            check_writable(path)
    if plot is not None:
        check_plot(plot, [])
        require("matplotlib")
        if out is not None and os.path.realpath(out) == os.path.realpath(plot):
            raise ConfigError(f"--out and --plot are both {out}; expected two different files")
    rounds = args.rounds or suite.rounds
    machine = describe_machine(args.threads)
    with _progress(len(workloads) * (rounds + 1)) as advance:
        gemm = gemm_flops_per_second(args.backends[0], args.threads, dtype_of(args.sizes))
        results, notes = _measure_all(workloads, args, suite, rounds, advance)
    run = make_run(args.suite, machine, gemm, results, notes)
    if out is not None:
        write_json(out, run)
    if plot is not None:
        from xformer.cli.bench_plot import draw_throughput

        draw_throughput(run, plot)
    if as_json:
        print(json.dumps(run))
    else:
        print(machine_line(run), *format_table(run), sep="\n")


def _checked_suite(args: BenchArgs) -> Suite:
    """Return the suite after checking its settings, the backends and the number of threads."""
    if args.suite not in SUITES:
        raise ConfigError(f"the suite is {args.suite!r}; expected one of {', '.join(SUITES)}")
    suite = SUITES[args.suite].quick() if args.quick else SUITES[args.suite]
    for name in args.sizes:
        if name not in (*AXES, *suite.settings):
            raise ConfigError(f"--{name.replace('_', '-')} does not apply to {args.suite}")
    dtype = dtype_of(args.sizes)
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if dtype == "float64" and args.suite == "train":
        raise ConfigError("--dtype is 'float64'; expected float32, float16 or bfloat16 for train")
    for index, name in enumerate(args.backends):
        if name in args.backends[:index]:
            raise ConfigError(f"--backend {name} is given twice; expected each library once")
        dtype_named(resolve(name), dtype)
    cores = num_threads()
    if args.threads is not None and args.threads > cores:
        raise ConfigError(f"--threads is {args.threads}; expected at most {cores}, the threads of this process")
    return suite


def check_writable(path: Path) -> None:
    """Raise ConfigError if a file cannot be written at this path."""
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        raise ConfigError(f"cannot write {path}: it is not a regular file")
    parent = unwritable_parent(target)
    if parent is not None:
        raise ConfigError(f"cannot write {path}: {parent} is not a writable directory")


def _measure_all(
    workloads: list[Workload], args: BenchArgs, suite: Suite, rounds: int, advance: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the results and a note for each workload that failed, unless the first one failed."""
    results: list[dict[str, Any]] = []
    notes: list[str] = []
    for workload in workloads:
        try:
            results.append(_measure(workload, args, suite, rounds, advance))
        except BackendError as error:
            if not results:
                raise
            notes.append(f"{workload.name}: {error}")
    return results, notes


def _measure(
    workload: Workload, args: BenchArgs, suite: Suite, rounds: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    with interleaved_benchmark(workload, backend_specs(suite, args.backends), args.threads) as benchmark:
        for _ in range(rounds):
            advance(workload.name)
            benchmark.run_round()
        advance(workload.name)
        return benchmark.result()


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar on a terminal."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    # Redraw twice a second only, so that drawing does not disturb the measurement.
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        task = progress.add_task("matrix product", total=steps)
        yield lambda name: progress.update(task, description=name, advance=1)
