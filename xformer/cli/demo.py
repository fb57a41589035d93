"""`xformer demo`: the whole path in a minute, on made-up text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xformer.cli.backend import BackendOption

HELP = """Train a small translator on made-up text and show what it learned, in a minute or so on two cores.

\b
  xformer demo                   English number words to German, 90 seconds
  xformer demo --task reverse    sequences of symbols, backwards, 60 seconds
  xformer demo --task copy       sequences of symbols, as they are, 60 seconds

German says the units before the tens ("forty-two" is "zweiundvierzig"), so attention has to learn to cross; DIR gets \
a picture of it (attention.png). DIR is then a run like any other: translate with it, inspect it.
"""


def demo(
    task: Annotated[str, typer.Option(metavar="numbers|reverse|copy", help="What to learn.")] = "numbers",
    seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Train for at most this long (default: 90 for numbers, 60 for the others)."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the text and of the model.")] = 0,
    out: Annotated[
        Path,
        typer.Option("--out", metavar="DIR", help="Directory of the run: new, empty, or an earlier demo, replaced."),
    ] = Path("xformer-demo"),
    backend: BackendOption = "numpy",
) -> int:
    """Train a small translator on made-up text and show what it learned."""
    from xformer.cli.demo_run import run_demo

    return run_demo(task, seconds=seconds, seed=seed, out=out, backend=backend)
