"""`xformer translate`: translate lines of text."""

from __future__ import annotations

import itertools
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from xformer.cli import _io
from xformer.cli._console import line_progress, loading_progress, make_console, plural
from xformer.cli._options import (
    COMPUTING,
    DATA,
    BackendOption,
    ModelOption,
    QuantizeOption,
    SetOption,
    config_options,
    file_option,
    open_backend,
    parse_generation_settings,
)
from xformer.config import Config, field_names, option
from xformer.families.checkpoint import is_public
from xformer.generation import GenerationConfig
from xformer.pipelines import Output, Pipeline, TextToText, Translator, check_source_lengths
from xformer.pipelines.encoders import EncoderPipeline
from xformer.runs.run_directory import RunDirectory

HELP = """Translate text with a public checkpoint (a directory in the Hugging Face format) or with the best model of a \
training run: one line in, one line out, in the same order.

\b
A file         xformer translate --model run --input test.de --output out.en
Beam search    xformer translate --model run --input test.de --output out.en \\
                 --num-beams 5 --length-penalty 0.6
A pipe         head -3 test.de | xformer translate --model run
Interactively  xformer translate --model run
A public model of many languages
               xformer translate --model nllb-200 --input test.de \\
                 --source-language deu_Latn --target-language eng_Latn

Lines from a terminal or a pipe are translated as they arrive. Blank lines stay blank. An output file appears when it \
is complete. With --num-return-sequences above 1, or with --align, each output is a line of JSON with the number of \
its source line, rank, score, text, and the alignment of its tokens.
"""
Loaded = TypeVar("Loaded", bound=Pipeline | EncoderPipeline)


class LineOptions(Config):
    """Arguments of `TextToText.batches_of_ids` that are options of translate and summarize."""

    align: bool = option(
        "Write JSON with the source token that each token attends to most.", default=False, panel="Search"
    )
    target_length: int | None = option(
        "Length of the outputs; uses 4 beams unless num_beams is given.",
        default=None,
        at_least=1,
        panel="Length of the output",
    )
    length_unit: str = option("Unit of --target-length.", default="tokens", choices=("tokens", "words"))
    prefix: str | None = option("Text that every output begins with.", default=None, panel="Steering")
    sequence_bias: tuple[str, ...] = option("Word or phrase to favor; repeatable.", default=())
    source_language: str | None = option(
        "Language of the input, for models of many languages, e.g. deu_Latn.", default=None, panel=DATA
    )
    target_language: str | None = option("Language of the output.", default=None)
    seed: int = option("Seed; the same seed gives the same samples.", default=0, panel="Sampling")
    max_source_length: int = option(
        "Maximum tokens of a line; longer lines are errors.", default=1024, at_least=1, panel=COMPUTING
    )
    batch_tokens: int = option(
        "Maximum tokens of a batch, padding included; more takes more memory.", default=4096, at_least=1
    )


def line_command(name: str, pipeline_type: type[TextToText]) -> Callable[..., None]:
    """Return the command that writes an output of a pipeline for each line of its input."""

    @config_options(
        GenerationConfig,
        LineOptions,
        names=[
            *("num_beams", "num_return_sequences", "length_penalty", "align"),
            *("max_new_tokens", "target_length", "length_unit"),
            *("prefix", "sequence_bias", "no_repeat_ngram_size"),
            *(("source_language", "target_language") if pipeline_type is Translator else ()),
            *("temperature", "top_k", "top_p", "seed"),
            *("max_source_length", "batch_tokens"),
        ],
    )
    def command(
        model: ModelOption,
        source: Annotated[str, file_option("--input", "Texts, one per line; - is standard input.")] = "-",
        output: Annotated[str, file_option("--output", "Outputs; - is standard output.")] = "-",
        *,
        settings: dict[str, Any],
        backend: BackendOption = "numpy",
        quantize: QuantizeOption = None,
        assignments: SetOption = None,
    ) -> None:
        settings |= parse_generation_settings(assignments)
        transform_lines(pipeline_type, model, source, output, settings, backend=backend, quantize=quantize)

    command.__name__ = name
    return command


translate = line_command("translate", Translator)


def transform_lines(
    pipeline_type: type[TextToText],
    directory: Path,
    source: str,
    output: str,
    settings: dict[str, Any],
    **loading: Any,
) -> None:
    """Write an output for each line of the source.

    A stream is processed as it arrives, a file as a whole, so that nothing is written if its last line is invalid.

    Args:
        pipeline_type: Class of the pipeline.
        directory: Directory of the model.
        source: File to read.
        output: File to write.
        settings: Options of the command by name.
        **loading: Arguments of `load_pipeline`.
    """
    options = LineOptions(**{name: settings.pop(name) for name in field_names(LineOptions) if name in settings})
    arguments = options.to_dict()
    max_source_length = arguments.pop("max_source_length")
    languages = {name: arguments.pop(name) for name in ("source_language", "target_language")}
    GenerationConfig(**settings)  # refuses contradictions before the model is loaded
    _io.check_output(output, source, RunDirectory(directory).files())
    pipeline = load_pipeline(
        pipeline_type,
        directory,
        **loading,
        **{name: value for name, value in languages.items() if value is not None},
    )
    config = GenerationConfig.resolve(pipeline.defaults, settings)
    if _io.is_terminal(source):
        make_console(stderr=True).print("type a line; Ctrl-D ends the input")
    num_truncated: list[int] = []
    chunks: Iterable[list[Sequence[int]]] = _encode(pipeline, source, max_source_length, num_truncated)
    total = None
    if not _io.is_stream(source):
        chunks = list(chunks)
        total = sum(1 for encoded in chunks for ids in encoded if ids)
    num_unfinished, num_done = 0, 0
    plain = config.num_return_sequences == 1 and not options.align
    visible = output != _io.STANDARD or not sys.stdout.isatty()
    with _io.open_output(output) as write, line_progress(total, visible=visible) as advance:
        for encoded in chunks:
            results: list[list[Output]] = [[] for _ in encoded]
            for batch in pipeline.batches_of_ids(encoded, config, first_index=num_done, **arguments):
                for row, outputs in batch:
                    results[row] = outputs
                    num_unfinished += not outputs[0].finished
                advance(len(batch))
            rows = zip(encoded, results, itertools.count(num_done))
            write([line for ids, outputs, row in rows for line in _format(pipeline, ids, outputs, row, plain)])
            num_done += len(encoded)
    if sum(num_truncated):
        limit = plural(pipeline.max_source_tokens or 0, "token")
        make_console(stderr=True).print(
            f"note: {plural(sum(num_truncated), 'source')} truncated to {limit}, as in training"
        )
    if num_unfinished:
        hint = "--max-new-tokens" if options.target_length is None else "--num-beams, --set length_tolerance=..."
        make_console(stderr=True).print(
            f"note: {plural(num_unfinished, 'output')} reached the length limit and may be incomplete ({hint})"
        )


def load_pipeline(pipeline_type: type[Loaded], directory: Path, backend: str, **options: Any) -> Loaded:
    """Load a public checkpoint, or a run with a backend that is prepared for the data type of its model."""
    loader: Any = pipeline_type  # mypy takes the bound for its class
    if is_public(directory):
        with loading_progress() as progress:
            return loader.from_pretrained(directory, xp=open_backend(backend), progress=progress, **options)
    training = RunDirectory(directory).read_config().get("recipe", {}).get("training", {})
    return loader.from_pretrained(directory, xp=open_backend(backend, training.get("dtype")), **options)


def _encode(
    pipeline: TextToText, source: str, max_source_length: int, num_truncated: list[int]
) -> Iterator[list[Sequence[int]]]:
    """Yield the token ids of the input in chunks, and append the numbers of truncated lines."""
    name = _io.STANDARD_INPUT if source == _io.STANDARD else source
    first_number = 1
    for lines in _io.read_chunks(source):
        encoded, count = pipeline.truncate(pipeline.encode(lines))
        num_truncated.append(count)
        check_source_lengths(encoded, max_source_length, name=f"{name} line", first_number=first_number)
        yield [array("i", ids) for ids in encoded]  # a file is held in memory
        first_number += len(lines)


def _format(pipeline: TextToText, ids: Sequence[int], outputs: list[Output], row: int, plain: bool) -> Iterator[str]:
    """Yield the lines written for one input line: its text, or a JSON object for each output."""
    if plain:
        yield outputs[0].text if outputs else ""
        return
    for rank, output in enumerate(outputs, start=1):
        entry = {
            "line": row + 1,
            "rank": rank,
            "score": round(output.score, 6),
            "log_probability": round(output.log_probability, 6),
            "finished": output.finished,
            "text": output.text,
        }
        if output.alignment is not None:
            entry["source_tokens"] = pipeline.tokenizers.source.tokens([*ids, *pipeline.suffix])
            entry["tokens"] = pipeline.tokenizers.target.tokens(output.tokens)
            entry["alignment"] = output.alignment
        yield json.dumps(entry, ensure_ascii=False)
