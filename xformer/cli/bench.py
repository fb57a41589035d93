r"""`xformer bench`: measure the speed and memory of parts of a model on this machine.

Measure parts of a Transformer on this machine, on one array library or interleaved on several.

\b
Attention            xformer bench attention
Compare libraries    xformer bench all --backend numpy --backend torch \
                       --backend mlx --backend dpnp --plot all.png
One size             xformer bench layer --batch 4 --length 1024 \
                       --causal --backward
Growth with length   xformer bench attention --sweep length=128,256,512 \
                       --plot growth.png
Beside torch.nn      xformer bench encoder --peer torch.nn
On a GPU             xformer bench model --backend cupy --dtype bfloat16 --jit
For a report         xformer bench all --markdown --out all.json

\b
attention     softmax(QK')V alone
layer         multi-head attention with its four projections
feed-forward, norm, encoder, decoder, model
              these parts, forward, or with --backward their gradients, too
train-step    forward, backward and Adam
decode        greedy search, 32 tokens of each text
all           every part at one size
memory        attention forward and backward, up to 16,384 tokens; memory
              should grow with the length, not with its square

Each library runs in its own process, and the processes take turns, so that other load affects all of them.
Times are medians with quartiles. A ratio is the median, over the rounds, of a library's time divided by the time of
the first one: above 1, the first one is faster. "of GEMM" is relative to the fastest matrix product measured here.
Memory is the peak beyond the inputs. Results are compared before anything is timed. Run nothing else meanwhile.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from xformer.backends import resolve
from xformer.benchmarks.interleaved import DTYPES, dtype_of
from xformer.benchmarks.machine import describe_machine, gemm_flops_per_second
from xformer.benchmarks.parts import AXES, DEFAULTS, PEERS, SUITES
from xformer.benchmarks.report import format_growth, format_markdown, format_table, machine_line, make_run
from xformer.benchmarks.run import measure
from xformer.cli._io import check_writable
from xformer.cli._options import argument, config_options, option_name
from xformer.cli._plots import check_plot, draw_bars, draw_growth
from xformer.config import Config, check_count, field_names, option
from xformer.errors import BackendError, ConfigError, check_choice
from xformer.io import write_json
from xformer.runs.console import progress_bar
from xformer.text.extras import require
from xformer.threads import num_threads


class BenchOptions(Config):
    """Settings of `xformer.benchmarks.parts.Suite`, and options of the measurement.

    Args:
        batch: Batch size; repeat for a grid.
        length: Tokens per sentence; repeat for a grid.
        heads: Attention heads; repeat for a grid.
        head_dim: Features per head; d_model is heads * head_dim; repeat for a grid.
        layers: Layers of each stack; repeat for a grid.
        vocabulary: Tokens of the vocabulary; repeat for a grid.
        sweep: Sizes of one axis, as in length=128,256,512; prints how the time grows.
        causal: Causal attention.
        padded: Pad sentences of half the length or more.
        backward: Include gradients.
        jit: Compile by xf.jit, where it has an effect.
        dtype: Data type (default: float32).
        backend: Array library; repeat for several (default: numpy).
        peer: Also measure torch.nn or textbook NumPy; repeat for both.
        rounds: Number of rounds (default: 7; memory 1).
        threads: Threads per library (default: XFORMER_NUM_THREADS).
        quick: Measure one size in three rounds.
        json: Print JSON instead of a table.
        markdown: Print a table in Markdown.
        out: Write all measurements as JSON.
        plot: Plot the times as bars (of memory: the peaks).
    """

    batch: tuple[int, ...] = option(default=(), panel="Sizes")
    length: tuple[int, ...] = option(default=())
    heads: tuple[int, ...] = option(default=())
    head_dim: tuple[int, ...] = option(default=())
    layers: tuple[int, ...] = option(default=())
    vocabulary: tuple[int, ...] = option(default=())
    sweep: str | None = option(default=None)
    causal: bool = option(default=False)
    padded: bool = option(default=False)
    backward: bool = option(default=False)
    jit: bool = option(default=False)
    dtype: str | None = option(default=None, choices=DTYPES)
    backend: tuple[str, ...] = option(default=(), metavar="NAME", panel="Measurement")
    peer: tuple[str, ...] = option(default=(), metavar="NAME")
    rounds: int | None = option(default=None, at_least=1)
    threads: int | None = option(default=None, at_least=1)
    quick: bool = option(default=False)
    json: bool = option(default=False, panel="Output")
    markdown: bool = option(default=False)
    out: str | None = option(default=None, metavar="FILE.json")
    plot: str | None = option(default=None, metavar="FILE.png")


@config_options(BenchOptions, names=field_names(BenchOptions))
def bench(
    suite: Annotated[str, argument("SUITE", "What to measure: a name from the list above.")], settings: dict[str, Any]
) -> None:
    """Measure speed and memory."""
    options = BenchOptions(**settings)
    backends, peers, threads = options.backend or ("numpy",), options.peer, options.threads
    out, plot = options.out, None if options.plot is None else Path(options.plot)
    settings = {name: value for name, value in settings.items() if name in DEFAULTS}
    axis, sizes = _sweep(options.sweep)
    settings |= {axis: sizes} if axis else {}
    check_choice("the suite", suite, SUITES)
    checked = SUITES[suite].quick() if options.quick else SUITES[suite]
    _check(backends, peers, settings, threads)
    if axis:  # with one size of every other axis
        checked = checked.quick()._replace(rounds=checked.rounds)
        settings = {name: value[:1] if name in AXES and name != axis else value for name, value in settings.items()}
    workloads = checked.workloads(**settings)
    for path in (out, plot):
        if path is not None:
            check_writable(str(path))
    if plot is not None:
        check_plot(plot, [])
        require("matplotlib")
        if out is not None and os.path.realpath(out) == os.path.realpath(plot):
            raise ConfigError(f"--out and --plot are both {out}; expected two different files")
    rounds = options.rounds or checked.rounds
    machine = describe_machine(threads, backends)
    with progress_bar("matrix product", total=len(workloads) * rounds + 1, per_second=2) as update:
        gemm = gemm_flops_per_second(backends[0], threads, dtype_of(settings))
        results, notes = measure(
            workloads, backends, rounds, threads, peers, lambda name: update(description=name, advance=1)
        )
    if not results:
        raise BackendError(notes[0].partition(": ")[2])
    notes += format_growth(results, axis) if axis else []
    run = {**make_run(suite, machine, gemm), "results": results, "notes": notes}
    if out is not None:
        write_json(out, run)
    if plot is not None:
        draw_growth(run, axis, plot) if axis else draw_bars(run, plot)
    if options.json:
        print(json.dumps(run))
    else:
        print(machine_line(run), *(format_markdown if options.markdown else format_table)(run), sep="\n")


def _sweep(text: str | None) -> tuple[str, tuple[int, ...]]:
    """Return the axis and the sizes of --sweep."""
    if text is None:
        return "", ()
    axis, _, values = text.partition("=")
    axis = axis.replace("-", "_")
    sizes = tuple(int(value) for value in values.split(",") if value.strip().isdigit())
    if axis not in AXES or len(sizes) != len(values.split(",")) or len(set(sizes)) < 2 or 0 in sizes:
        raise ConfigError(f"--sweep is {text!r}; expected an axis and two or more sizes, as in length=128,256,512")
    return axis, sizes


def _check(backends: Sequence[str], peers: Sequence[str], sizes: dict[str, Any], threads: int | None) -> None:
    """Raise ConfigError for invalid libraries, peers, sizes or numbers of threads."""
    for peer in peers:
        check_choice("--peer", peer, PEERS)
    for size, values in sizes.items():
        for value in values if size in AXES else ():
            check_count(option_name(size), value)
    for backend in backends:
        if backends.count(backend) > 1:
            raise ConfigError(f"--backend {backend} is given twice; expected each library once")
        resolve(backend).dtype_named(dtype_of(sizes))
    if (threads or 1) > (cores := num_threads()):
        raise ConfigError(f"--threads is {threads}; expected at most {cores}, the threads of this process")
