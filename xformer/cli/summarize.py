"""`xformer summarize`: one document a line in, one summary a line out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli.backend import BackendOption
from xformer.cli.decoding import with_decoding_options

HELP = """Summarise documents with the best model of a run: one document a line in, one summary a line out.

\b
A file          xformer summarize --model run --input test.abstract --output titles
Ten words each  xformer summarize --model run --input test.abstract \\
                  --num-beams 5 --desired-length 10 --length-unit words
About something xformer summarize --model run --input test.abstract --topic "machine translation"

The model comes from: xformer train --task summarization. Everything else is as with translate.
"""


@with_decoding_options
def summarize(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Directory of a run.", rich_help_panel="Text")],
    settings: dict[str, Any],
    source: Annotated[
        str,
        typer.Option("--input", metavar="FILE", help="Documents, one a line; - is standard input.",
                     rich_help_panel="Text"),
    ] = "-",
    output: Annotated[
        str,
        typer.Option("--output", metavar="FILE", help="Summaries; - is standard output.", rich_help_panel="Text"),
    ] = "-",
    backend: BackendOption = "numpy",
) -> None:  # fmt: skip
    """Summarise documents."""
    from xformer.cli.write import write_lines
    from xformer.pipelines import Summarizer

    write_lines(Summarizer, model, source, output, backend, settings)
