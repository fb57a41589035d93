"""`xformer export`: write the model of a run in the format of another library."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from xformer.cli._console import make_console
from xformer.errors import ConfigError
from xformer.pipelines.export import export_run

HELP = """Write the best model of a run, and its tokenizer, as a directory in the Hugging Face format for \
transformers and other programs.

\b
  xformer export run checkpoint
  xformer translate --model checkpoint --input test.de

Translators and summarizers become Pegasus models, or Marian models with post-norm; language models become Llama or \
GPT-2 models. If none of them computes the same, the error names the field of the configuration that differs. \
A run that started from a public checkpoint (--init) is written in the format of that checkpoint.
"""


def export(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.", show_default=False)],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; new or empty.", show_default=False)
    ],
    target: Annotated[str, typer.Option("--format", metavar="NAME", help="Format: huggingface.")] = "huggingface",
) -> None:
    """Export the model of a run."""
    if target != "huggingface":
        raise ConfigError(f"--format is {target!r}; expected 'huggingface'")
    model_type = export_run(directory, output)
    make_console().print(f"the model is in {output}, as a model of type {model_type}")
