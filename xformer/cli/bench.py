"""`xformer bench`: measure the speed and memory of parts of a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SIZES, RUN, RESULT = "Sizes", "Measurement", "Output"

HELP = """Measure speed and memory on this machine, on one array library or interleaved on several.

\b
Attention            xformer bench attention
Compare libraries    xformer bench attention --backend numpy --backend torch
One size             xformer bench attention --batch 4 --length 1024 \\
                       --causal --backward
On a GPU             xformer bench attention --backend cupy --dtype bfloat16
Plot and JSON        xformer bench attention --plot speed.png --out speed.json

\b
attention   softmax(QK')V, or the multi-head layer with --layer
encoder     a stack of encoder layers, forward
train       a training step of a translator: forward, backward, Adam
decode      translation: 48 tokens for each sentence of random text
memory      attention forward and backward, up to 16,384 tokens; memory
            should grow with the length, not with its square

Each library runs in a process of its own, and the processes take turns, so that other load affects all of them. \
Times are medians with quartiles. A ratio is the median, over the rounds, of a library's time divided by the time of \
the first one: above 1, the first one is faster. "of GEMM" is relative to the fastest matrix product measured here. \
Memory is the peak beyond the inputs. Results are compared before anything is timed. Run nothing else meanwhile.
"""

_AXIS: Any = {"metavar": "N", "min": 1, "rich_help_panel": SIZES}


def bench(
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="What to measure: a name from the list above.")],
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME", help="Array library; repeat for several (default: numpy)."),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", help="Batch size; repeat for a grid.", **_AXIS)] = None,
    length: Annotated[
        list[int] | None, typer.Option("--length", help="Tokens per sentence; repeat for a grid.", **_AXIS)
    ] = None,
    heads: Annotated[
        list[int] | None, typer.Option("--heads", help="Attention heads; repeat for a grid.", **_AXIS)
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option("--head-dim", help="Features per head; d_model is heads * head_dim; repeat for a grid.", **_AXIS),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", help="Layers of each stack (encoder, train, decode).", **_AXIS)
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option("--vocabulary", help="Vocabulary size (train, decode).", **{**_AXIS, "min": 5})
    ] = None,
    beam: Annotated[int | None, typer.Option("--beam", help="Beam size (decode); 1 is greedy search.", **_AXIS)] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal", help="Causal attention (attention, memory).", rich_help_panel=SIZES)
    ] = None,
    padded: Annotated[
        bool | None,
        typer.Option(
            "--padded", help="Pad sentences of half the length or more (attention, memory).", rich_help_panel=SIZES
        ),
    ] = None,
    backward: Annotated[
        bool | None, typer.Option("--backward", help="Include gradients (attention, memory).", rich_help_panel=SIZES)
    ] = None,
    layer: Annotated[
        bool | None,
        typer.Option("--layer", help="Include the four projections (attention, memory).", rich_help_panel=SIZES),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32 (default), float64, float16 or bfloat16 (train: in mixed precision).",
            rich_help_panel=SIZES,
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure one size in three rounds.", rich_help_panel=RUN)
    ] = False,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Number of rounds (default: 7; decode 5, memory 1).", rich_help_panel=RUN
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Threads per library (default: XFORMER_NUM_THREADS).", rich_help_panel=RUN
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write all measurements as JSON.", rich_help_panel=RESULT)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Plot tokens/s against length and batch size.", rich_help_panel=RESULT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=RESULT)
    ] = False,
) -> None:
    """Measure speed and memory."""
    from xformer.cli.bench_run import BenchArgs, run_bench

    axes = {"batch": batch, "length": length, "heads": heads, "head_dim": head_dim}
    settings = {
        "causal": causal,
        "padded": padded,
        "backward": backward,
        "layer": layer,
        "layers": layers,
        "vocabulary": vocabulary,
        "beam": beam,
        "dtype": dtype,
    }
    sizes = {name: value for name, value in {**axes, **settings}.items() if value is not None}
    args = BenchArgs(suite, tuple(backend or ["numpy"]), sizes, rounds, threads, quick)
    run_bench(args, out=out, plot=plot, as_json=as_json)
