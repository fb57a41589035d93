"""`xformer bench`: how fast the parts of a model are on this machine, library by library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SIZES, RUN, RESULT = "Sizes", "How it is measured", "What becomes of it"

HELP = """Measure the speed and memory of a piece of work here, on one array library or on several in turns.

\b
Attention            xformer bench attention
Libraries compared   xformer bench attention --backend numpy --backend torch
One size             xformer bench attention --batch 4 --length 1024 \\
                       --causal --backward
On a GPU             xformer bench attention --backend cupy --dtype bfloat16
A picture, figures   xformer bench attention --plot speed.png --out speed.json

\b
attention   softmax(QK')V, or with --layer the layer around it
encoder     a stack of encoder layers, forward
train       a train step of a translator: forward, backward, Adam
decode      a translator writes 48 tokens for each sentence of random text
memory      attention once, forward and backward, up to 16,384 tokens: look
            at the memory, which should grow with the length, not its square

Each library works in a process of its own. They take turns, so whatever else the machine does hurts all of them. \
Times are medians, with quartiles; a ratio is the median, over the turns, of a library's time divided by that of the \
first one: above 1, the first one is faster. "of GEMM" compares with the fastest matrix product measured here; memory \
is what the work takes beside its inputs, at most. Before anything is timed, answers are compared. Let nothing else run.
"""

_AXIS: Any = {"metavar": "N", "min": 1, "rich_help_panel": SIZES}


def bench(
    work: Annotated[str, typer.Argument(metavar="WORK", help="What to measure, from the list above.")],
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", metavar="NAME", help="Array library; again for more (default: numpy)."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", help="Sentences at a time; again for a grid.", **_AXIS)
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option("--length", help="Tokens of a sentence; again for a grid.", **_AXIS)
    ] = None,
    heads: Annotated[
        list[int] | None, typer.Option("--heads", help="Attention heads; again for a grid.", **_AXIS)
    ] = None,
    head_dim: Annotated[
        list[int] | None,
        typer.Option("--head-dim", help="Features of a head; d_model is heads times it; again for a grid.", **_AXIS),
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", help="Of each stack (encoder, train, decode).", **_AXIS)
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option("--vocabulary", help="Of train and decode, in tokens.", **{**_AXIS, "min": 5})
    ] = None,
    beam: Annotated[int | None, typer.Option("--beam", help="Beam size of decode; 1 is greedy.", **_AXIS)] = None,
    causal: Annotated[
        bool | None,
        typer.Option("--causal", help="No token sees later ones (attention, memory).", rich_help_panel=SIZES),
    ] = None,
    padded: Annotated[
        bool | None,
        typer.Option(
            "--padded", help="Sentences of half the length or more (attention, memory).", rich_help_panel=SIZES
        ),
    ] = None,
    backward: Annotated[
        bool | None, typer.Option("--backward", help="With the gradients (attention, memory).", rich_help_panel=SIZES)
    ] = None,
    layer: Annotated[
        bool | None,
        typer.Option("--layer", help="With the four projections (attention, memory).", rich_help_panel=SIZES),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32 (default), float64, float16 or bfloat16 (train: in mixed precision).",
            rich_help_panel=SIZES,
        ),
    ] = None,
    turns: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="How often to measure (default: 7; decode 5, memory 1).", rich_help_panel=RUN
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Of each library (default: XFORMER_NUM_THREADS).", rich_help_panel=RUN),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write all figures.", rich_help_panel=RESULT)
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw tokens/s against length and batch.", rich_help_panel=RESULT),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of the table.", rich_help_panel=RESULT)
    ] = False,
) -> None:
    """Measure the speed and memory of a piece of work."""
    from xformer.cli.bench_run import Request, run_bench

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
    given = {name: value for name, value in {**axes, **settings}.items() if value is not None}
    run_bench(Request(work, tuple(backend or ["numpy"]), given, turns, threads), out=out, plot=plot, as_json=as_json)
