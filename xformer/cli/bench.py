r"""`xformer bench`: measure the speed and memory of parts of a model on this machine.

Measure speed and memory on this machine, on one array library or interleaved on several.

\b
Attention            xformer bench attention
Compare libraries    xformer bench attention --backend numpy --backend torch \
                       --backend mlx --backend dpnp --plot speed.png
One size             xformer bench attention --batch 4 --length 1024 \
                       --causal --backward
On a GPU             xformer bench attention --backend cupy --dtype bfloat16
Plot and JSON        xformer bench attention --plot speed.png --out speed.json

\b
attention   softmax(QK')V, or the multi-head layer with --layer
memory      attention forward and backward, up to 16,384 tokens; memory
            should grow with the length, not with its square

Each library runs in its own process, and the processes take turns, so that other load affects all of them.
Times are medians with quartiles. A ratio is the median, over the rounds, of a library's time divided by the time of
the first one: above 1, the first one is faster. "of GEMM" is relative to the fastest matrix product measured here.
Memory is the peak beyond the inputs. Results are compared before anything is timed. Run nothing else meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.backends import resolve
from xformer.benchmarks.attention import AXES, SUITES, Suite, backend_specs
from xformer.benchmarks.interleaved import DTYPES, Workload, dtype_of, interleaved_benchmark
from xformer.benchmarks.machine import describe_machine, gemm_flops_per_second
from xformer.benchmarks.report import format_table, machine_line, make_run
from xformer.cli._io import check_writable
from xformer.cli._options import config_options, option_name, value_option
from xformer.cli._plots import check_plot, draw_bars
from xformer.config import Config, check_count, field_names, option
from xformer.errors import BackendError, ConfigError
from xformer.io import write_json
from xformer.runs.console import progress_bar
from xformer.text.extras import require
from xformer.threads import num_threads


class BenchOptions(Config):
    """Settings of `xformer.benchmarks.attention.Suite`, and options of the measurement."""

    batch: tuple[int, ...] = option("Batch size; repeat for a grid.", default=(), panel="Sizes")
    length: tuple[int, ...] = option("Tokens per sentence; repeat for a grid.", default=())
    heads: tuple[int, ...] = option("Attention heads; repeat for a grid.", default=())
    head_dim: tuple[int, ...] = option("Features per head; d_model is heads * head_dim; repeat for a grid.", default=())
    causal: bool = option("Causal attention.", default=False)
    padded: bool = option("Pad sentences of half the length or more.", default=False)
    backward: bool = option("Include gradients.", default=False)
    layer: bool = option("Include the four projections.", default=False)
    dtype: str | None = option("Data type (default: float32).", default=None, choices=DTYPES)
    rounds: int | None = option(
        "Number of rounds (default: 7; memory 1).", default=None, at_least=1, panel="Measurement"
    )
    threads: int | None = option("Threads per library (default: XFORMER_NUM_THREADS).", default=None, at_least=1)
    quick: bool = option("Measure one size in three rounds.", default=False)
    json: bool = option("Print JSON instead of a table.", default=False, panel="Output")


@config_options(BenchOptions, names=field_names(BenchOptions))
def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="What to measure: a name from the list above.")],
    settings: dict[str, Any],
    backend: Annotated[
        list[str] | None, value_option("--backend", "NAME", "Array library; repeat for several (default: numpy).", None)
    ] = None,
    out: Annotated[Path | None, value_option("--out", "FILE.json", "Write all measurements as JSON.", "Output")] = None,
    plot: Annotated[
        Path | None, value_option("--plot", "FILE.png", "Plot the times as bars (of memory: the peaks).", "Output")
    ] = None,
) -> None:
    """Measure speed and memory."""
    backends = backend or ["numpy"]
    rounds, threads, quick, as_json = (settings.pop(name, None) for name in ("rounds", "threads", "quick", "json"))
    checked = _check_suite(suite, backends, settings, threads, quick=bool(quick))
    workloads = checked.workloads(**settings)
    for path in (out, plot):
        if path is not None:
            check_writable(str(path))
    if plot is not None:
        check_plot(plot, [])
        require("matplotlib")
        if out is not None and os.path.realpath(out) == os.path.realpath(plot):
            raise ConfigError(f"--out and --plot are both {out}; expected two different files")
    rounds = rounds or checked.rounds
    machine = describe_machine(threads, backends)
    total = len(workloads) * (rounds + 1)
    with progress_bar("matrix product", total=total, per_second=2) as update:
        gemm = gemm_flops_per_second(backends[0], threads, dtype_of(settings))
        results, notes = _measure_all(workloads, backends, rounds, threads, update)
    run = make_run(suite, machine, gemm, results, notes)
    if out is not None:
        write_json(out, run)
    if plot is not None:
        draw_bars(run, plot)
    if as_json:
        print(json.dumps(run))
    else:
        print(machine_line(run), *format_table(run), sep="\n")


def _check_suite(
    name: str, backends: Sequence[str], sizes: dict[str, Any], threads: int | None, *, quick: bool
) -> Suite:
    """Return the suite after checking its settings, the backends and the number of threads."""
    if name not in SUITES:
        raise ConfigError(f"the suite is {name!r}; expected one of {', '.join(SUITES)}")
    suite = SUITES[name].quick() if quick else SUITES[name]
    for size, values in sizes.items():
        for value in values if size in AXES else ():
            check_count(option_name(size), value)
    dtype = dtype_of(sizes)
    for index, backend in enumerate(backends):
        if backend in backends[:index]:
            raise ConfigError(f"--backend {backend} is given twice; expected each library once")
        resolve(backend).dtype_named(dtype)
    cores = num_threads()
    if threads is not None and threads > cores:
        raise ConfigError(f"--threads is {threads}; expected at most {cores}, the threads of this process")
    return suite


def _measure_all(
    workloads: list[Workload],
    backends: Sequence[str],
    rounds: int,
    threads: int | None,
    update: Callable[..., None],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the results and a note for each workload that failed, unless the first one failed."""
    results: list[dict[str, Any]] = []
    notes: list[str] = []
    for workload in workloads:
        try:
            with interleaved_benchmark(workload, backend_specs(backends), threads) as benchmark:
                for number in range(rounds + 1):
                    update(description=workload.name, advance=1)
                    if number < rounds:
                        benchmark.run_round()
                results.append(benchmark.result())
        except BackendError as error:
            if not results:
                raise
            notes.append(f"{workload.name}: {error}")
    return results, notes
