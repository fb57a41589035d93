"""What `xformer bench` does: check the request, race, print, write, draw."""

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
    WORKS,
    Case,
    Kind,
    describe_machine,
    entries,
    gemm_flops_per_second,
    make_run,
    racing,
    table,
)
from xformer.benchmarks.interleaved import DTYPES, dtype_of
from xformer.benchmarks.plan import AXES
from xformer.benchmarks.report import machine_line
from xformer.cli._console import make_console
from xformer.cli._plots import check_plot
from xformer.errors import BackendError, ConfigError
from xformer.io import unwritable_parent, write_json
from xformer.text.extras import require
from xformer.threads import num_threads


@dataclass(frozen=True)
class Request:
    """What to measure: sizes are fields of xformer.benchmarks.Sizes; None is the usual."""

    work: str
    backends: tuple[str, ...]
    sizes: dict[str, Any]
    turns: int | None
    threads: int | None


def run_bench(request: Request, *, out: Path | None, plot: Path | None, as_json: bool) -> None:
    """Measure, and show the result; raises ConfigError or BackendError, before any work, for what cannot be done."""
    kind = _checked(request)
    cases = kind.cases(dataclasses.replace(kind.sizes, **request.sizes))
    for path in (out, plot):
        if path is not None:
            check_writable(path)
    if plot is not None:
        check_plot(plot, [])
        require("matplotlib")
        if out is not None and os.path.realpath(out) == os.path.realpath(plot):
            raise ConfigError(f"--out and --plot are both {out}; choose another name for one of them")
    turns = request.turns or kind.turns
    described = describe_machine(request.threads)
    with _progress(len(cases) * (turns + 1)) as advance:
        gemm = gemm_flops_per_second(request.backends[0], request.threads, dtype_of(request.sizes))
        results, notes = _measure_all(cases, request, kind, turns, advance)
    run = make_run(request.work, described, gemm, results, notes)
    if out is not None:
        write_json(out, run)
    if plot is not None:
        from xformer.cli.bench_plot import draw_throughput

        draw_throughput(run, plot)
    if as_json:
        print(json.dumps(run))
    else:
        print(machine_line(run), *table(run), sep="\n")


def _checked(request: Request) -> Kind:
    """The kind of work; raises for an unknown one, for settings it does not have, and for libraries not there."""
    if request.work not in WORKS:
        raise ConfigError(f"the work is {request.work!r}; expected one of {', '.join(WORKS)}")
    kind = WORKS[request.work]
    for name in request.sizes:
        if name not in (*AXES, *kind.settings):
            option = name.replace("_", "-")
            raise ConfigError(f"--{option} means nothing to {request.work}; leave it out")
    dtype = dtype_of(request.sizes)
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype is {dtype!r}; expected one of {', '.join(DTYPES)}")
    if dtype == "float64" and request.work == "train":
        raise ConfigError("--dtype is 'float64', in which train is not measured; expected float32, float16 or bfloat16")
    for place, name in enumerate(request.backends):
        if name in request.backends[:place]:
            raise ConfigError(f"--backend {name} is given twice; expected each library once")
        dtype_named(resolve(name), dtype)
    cores = num_threads()
    if request.threads is not None and request.threads > cores:
        raise ConfigError(f"--threads is {request.threads}; expected at most {cores}, which this process may use")
    return kind


def check_writable(path: Path) -> None:
    """Raise ConfigError where a file could not be written when the work is done."""
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        raise ConfigError(f"cannot write {path}: it is not a regular file; give the name of a file")
    parent = unwritable_parent(place)
    if parent is not None:
        raise ConfigError(f"cannot write {path}: {parent} is not a directory that may be written to")


def _measure_all(
    cases: list[Case], request: Request, kind: Kind, turns: int, advance: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The results of all cases, and why some have none: one that is too large must not cost what was measured."""
    results: list[dict[str, Any]] = []
    notes: list[str] = []
    for case in cases:
        try:
            results.append(_measure(case, request, kind, turns, advance))
        except BackendError as error:
            if not results:
                raise
            notes.append(f"{case.name}: {error}")
    return results, notes


def _measure(case: Case, request: Request, kind: Kind, turns: int, advance: Callable[[str], None]) -> dict[str, Any]:
    with racing(case, entries(kind, request.backends), request.threads) as running:
        for _ in range(turns):
            advance(case.name)
            running.turn()
        advance(case.name)
        return running.result()


@contextlib.contextmanager
def _progress(steps: int) -> Iterator[Callable[[str], None]]:
    """Show on a terminal which case is measured, and how much is done."""
    console = make_console(stderr=True)
    if not console.is_terminal:
        yield lambda name: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    # Twice a second: what draws the bar must not take time from what is measured.
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, refresh_per_second=2) as progress:
        task = progress.add_task("the fastest matrix product", total=steps)
        yield lambda name: progress.update(task, description=name, advance=1)
