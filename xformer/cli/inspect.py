"""`xformer inspect`: what a run is and how it went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HELP = """Show a run: what it was told, the model's parameters by part, the tokenizers, and how training went.

\b
  xformer inspect run
  xformer inspect run --plot curves.png
  xformer inspect run --json
"""


def inspect(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a run.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw loss and score against updates, as a picture."),
    ] = None,
) -> None:
    """Show what a run is and how it went."""
    import json

    from xformer.cli.console import make_console
    from xformer.cli.report import collect, show

    if plot is not None:
        from xformer.cli.plots import check_picture, draw_curves
        from xformer.training import RunDirectory

        check_picture(plot, RunDirectory(directory).files())
    report = collect(directory)
    if plot is not None:
        training = report["config"].get("recipe", {}).get("training", {})
        draw_curves(report["log"], plot, label_smoothing=training.get("label_smoothing", 0.0))
    if as_json:
        print(json.dumps({name: value for name, value in report.items() if name != "log"}))
        return
    console = make_console()
    show(report, console)
    if plot is not None:
        console.print(f"\nthe curves are in {plot}")
