r"""`xformer embed`: compute vectors of texts.

Compute a vector for each line of a file with a public encoder such as all-MiniLM-L6-v2, and write them as a
NumPy array of shape (lines, features).

\b
  xformer embed --model all-MiniLM-L6-v2 --input texts.txt --output vectors.npy
  xformer embed --model all-MiniLM-L6-v2 --input all.txt --output vectors.npy --corpus-out parts --workers 4

The dot product of two rows is the similarity of their texts if the checkpoint normalizes its vectors. With
--corpus-out, several workers process chunks of the input, and the same command resumes after an interruption.
"""

from __future__ import annotations

import io
import time
from typing import Annotated, Any

import numpy as np

from xformer.cli import _io
from xformer.cli._corpus import ChunkFunction, CorpusOptions, process_file
from xformer.cli._options import CheckpointOption, config_options, file_option, value_option
from xformer.config import field_names
from xformer.errors import ConfigError, DataError
from xformer.io import is_device
from xformer.pipelines import ChunkOutput, Embedder
from xformer.pipelines.options import SearchOptions
from xformer.runs.console import make_console, plural


@config_options(SearchOptions, CorpusOptions, names=["batch_tokens", *field_names(CorpusOptions)])
def embed(
    model: CheckpointOption,
    output: Annotated[str, value_option("--output", "FILE.npy", "Vectors, a NumPy array; - is standard output.")],
    source: Annotated[str, file_option("--input", "Texts, one per line; - is standard input.")] = "-",
    *,
    settings: dict[str, Any],
    loading: dict[str, Any],
) -> None:
    """Compute vectors of texts."""
    if not output.endswith(".npy") and output != _io.STANDARD and not is_device(output):
        raise ConfigError(f"--output is {output}; expected a name that ends with .npy, a pipe, or -")
    corpus = CorpusOptions.pop_from(settings)
    output = corpus.output_path(output, ".npy")
    _io.check_output(output, [source], model)
    if corpus.corpus_out is not None:
        function = ChunkFunction(process_chunk, Embedder, model, loading, settings)
        process_file(function, source, output, corpus, ".npy")
        return
    texts = [line for lines in _io.read_chunks(source) for line in lines]
    if not texts:
        raise DataError(f"{_io.STANDARD_INPUT if source == _io.STANDARD else source} has no lines; expected texts")
    embedder = _io.load_pipeline(Embedder, model, **loading)
    started = time.monotonic()
    data = process_chunk(embedder, texts, 0, **settings).data
    with _io.open_bytes(output) as file:
        file.write(data)
    _, size = np.load(io.BytesIO(data)).shape
    place = "standard output" if output == _io.STANDARD else output
    seconds = f"{time.monotonic() - started:.1f} s"
    make_console(stderr=True).print(f"{plural(len(texts), 'vector')} of {size:,} numbers in {place}, {seconds}")


def process_chunk(embedder: Embedder, lines: list[str], first_index: int, **options: Any) -> ChunkOutput:
    """Return the vectors of a chunk of lines in the format of NumPy; this is what workers run for a large file."""
    content = io.BytesIO()
    np.save(content, embedder(lines, **options), allow_pickle=False)
    return ChunkOutput(content.getvalue())
