"""`xformer summarize`: summarize documents."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from xformer.cli._options import DATA, BackendOption, ModelOption, SetOption, parse_generation_settings
from xformer.cli.translate import line_options, transform_lines
from xformer.pipelines import Summarizer

HELP = """Summarize documents with the best model of a training run: one document per line in, one summary per line \
out.

\b
A file          xformer summarize --model run --input test.abstract --output titles
Ten words each  xformer summarize --model run --input test.abstract \\
                  --num-beams 5 --target-length 10 --length-unit words
On a topic      xformer summarize --model run --input test.abstract \\
                  --sequence-bias "machine translation"

Train the model with: xformer train --task summarization. Input and output are as with `xformer translate`.
"""


@line_options
def summarize(
    model: ModelOption,
    source: Annotated[
        str,
        typer.Option(
            "--input", metavar="FILE", help="Documents, one per line; - is standard input.", rich_help_panel=DATA
        ),
    ] = "-",
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="Summaries; - is standard output.", rich_help_panel=DATA)
    ] = "-",
    *,
    settings: dict[str, Any],
    backend: BackendOption = "numpy",
    assignments: SetOption = None,
) -> None:
    """Summarize documents."""
    settings |= parse_generation_settings(assignments)
    transform_lines(Summarizer, model, source, output, backend, settings)
