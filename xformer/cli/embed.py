"""`xformer embed`: compute vectors of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from xformer.cli import _io
from xformer.cli._console import loading_progress
from xformer.cli._options import COMPUTING, DATA, BackendOption, CheckpointOption, QuantizeOption, open_backend
from xformer.errors import ConfigError, DataError
from xformer.io import atomic_write
from xformer.pipelines import Embedder

HELP = """Compute a vector for each line of a file with a public encoder such as all-MiniLM-L6-v2, and write them as a \
NumPy array of shape (lines, features).

\b
  xformer embed --model all-MiniLM-L6-v2 --input texts.txt --output vectors.npy

The dot product of two rows is the similarity of their texts if the checkpoint normalizes its vectors.
"""


def embed(
    model: CheckpointOption,
    output: Annotated[
        Path, typer.Option("--output", metavar="FILE.npy", help="Vectors, a NumPy array.", rich_help_panel=DATA)
    ],
    source: Annotated[
        str,
        typer.Option("--input", metavar="FILE", help="Texts, one per line; - is standard input.", rich_help_panel=DATA),
    ] = "-",
    batch_tokens: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Maximum tokens in a batch, with padding.", rich_help_panel=COMPUTING),
    ] = 4096,
    backend: BackendOption = "numpy",
    quantize: QuantizeOption = None,
) -> None:
    """Compute vectors of texts."""
    if output.suffix != ".npy":
        raise ConfigError(f"--output is {output}; expected a name that ends with .npy")
    _io.check_output(str(output), source, [model / "config.json", model / "model.safetensors"])
    texts = [line for lines in _io.read_chunks(source) for line in lines]
    if not texts:
        raise DataError(f"{_io.STANDARD_INPUT if source == _io.STANDARD else source} has no lines; expected texts")
    with loading_progress() as progress:
        embedder = Embedder.from_pretrained(model, open_backend(backend), quantize=quantize, progress=progress)
    vectors = embedder(texts, batch_tokens=batch_tokens)
    with atomic_write(output) as file:
        np.save(file, vectors, allow_pickle=False)
