"""`xformer translate`: one line in, one line out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli.backend import BackendOption
from xformer.cli.decoding import with_decoding_options

HELP = """Translate text with the best model of a run: one line in, one line out, in the same order.

\b
A file     xformer translate --model run --input test.de --output out.en
Better     xformer translate --model run --input test.de --output out.en \\
             --num-beams 5 --length-penalty 0.6
A pipe     head -3 test.de | xformer translate --model run
By hand    xformer translate --model run

A line that you type, or that a slow pipe brings, is translated at once. Blank lines stay blank. An output file \
appears when it is whole. With --num-return-sequences above 1, and with --align, each output is a line of JSON: the number of \
its source line, its rank, its score, its text, and the alignment of its tokens.
"""


@with_decoding_options
def translate(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Directory of a run.", rich_help_panel="Text")],
    settings: dict[str, Any],
    source: Annotated[
        str,
        typer.Option("--input", metavar="FILE", help="Text to translate; - is standard input.", rich_help_panel="Text"),
    ] = "-",
    output: Annotated[
        str,
        typer.Option("--output", metavar="FILE", help="Translations; - is standard output.", rich_help_panel="Text"),
    ] = "-",
    backend: BackendOption = "numpy",
) -> None:
    """Translate lines of text."""
    from xformer.cli.write import write_lines
    from xformer.pipelines import Translator

    write_lines(Translator, model, source, output, backend, settings)
