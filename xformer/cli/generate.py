"""`xformer generate`: continue prompts with a language model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

import typer

from xformer.cli import _io
from xformer.cli._console import make_console
from xformer.cli._options import (
    DATA,
    LENGTH,
    SAMPLE,
    SEARCH,
    BackendOption,
    ModelOption,
    option,
    utf8,
    with_some_decoding_options,
)
from xformer.cli.translate import load_pipeline
from xformer.config import field_names
from xformer.errors import ConfigError
from xformer.generation import GenerationConfig
from xformer.pipelines import Continuation, TextGenerator
from xformer.runs.run_directory import RunDirectory

HELP = """Continue prompts with the best model of a run of train-lm, and print prompt and continuation.

\b
A sample          xformer generate --model run
From a prompt     xformer generate --model run --prompt "ROMEO:" --seed 1
Three per prompt  xformer generate --model run --prompt "ROMEO:" --prompt "JULIET:" --num-return-sequences 3
Prompts from a file, one per line, as lines of JSON
                  xformer generate --model run --input prompts.txt --json --output out.jsonl

Without a prompt, and for an empty line of the input, the text starts after a line end. By default texts are sampled \
with temperature 0.8 from the 200 most probable tokens; any sampling option, or --num-beams, replaces that, and \
--top-k 1 always takes the most probable token. Several texts are separated by a line of dashes. A text longer than \
the context of the model (context_length) is continued from its second half.
"""
_SEPARATOR = "-" * 15
# Those of translate that mean something without a source and without an end, and what differs.
_NAMES = (
    "num_beams", "num_return_sequences", "num_beam_groups", "diversity_penalty", "keep_greedy", "max_new_tokens",
    "sequence_bias", "sequence_bias_strength", "no_repeat_ngram_size", "repetition_penalty",
    "temperature", "top_k", "top_p", "min_p",
    "seed", "batch_tokens",
)  # fmt: skip
_INSTEAD: list[tuple[str, Any, Any]] = [
    (
        "num_beams",
        Annotated[int, option(SEARCH, "Above 1: beam search, within what the model sees at once.", min=1)],
        1,
    ),
    (
        "num_return_sequences",
        Annotated[int, option(SEARCH, "Texts for each prompt, the most probable first.", min=1)],
        1,
    ),
    ("max_new_tokens", Annotated[int, option(LENGTH, "Tokens to write.", min=1)], 500),
    (
        "temperature",
        Annotated[float | None, option(SAMPLE, "Logits are divided by it (default: 0.8, or 1 with other options).")],
        None,
    ),
]


@with_some_decoding_options(_NAMES, _INSTEAD)
def generate(
    model: ModelOption,
    settings: dict[str, Any],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt", metavar="TEXT", help="Text to continue; repeatable.", rich_help_panel=DATA, callback=utf8
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE", help="Prompts, one per line; - is standard input.", rich_help_panel=DATA
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="Texts; - is standard output.", rich_help_panel=DATA)
    ] = "-",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Write one JSON object per text: line, prompt, rank, log_probability, text (the continuation).",
            rich_help_panel=DATA,
        ),
    ] = False,
    backend: BackendOption = "numpy",
) -> None:
    """Continue prompts."""
    if prompt and source is not None:
        raise ConfigError("--prompt and --input are both given; expected only one of them")
    _io.check_output(output, source, RunDirectory(model).files())
    pipeline = load_pipeline(TextGenerator, model, backend)
    names = field_names(GenerationConfig)
    # Report contradictions before any input is read.
    pipeline.resolve_config(**{name: value for name, value in settings.items() if name in names})
    number = 0
    with _io.open_output(output) as write:
        for prompts in _read_prompts(prompt, source):
            results = pipeline.continuations(prompts, first_index=number, **settings)
            for text, outputs in zip(prompts, results, strict=True):
                write(list(_json_lines(number, text, outputs) if as_json else _texts(number, text, outputs)))
                number += 1


def _read_prompts(prompts: Sequence[str] | None, source: str | None) -> Iterable[list[str]]:
    """Return chunks of prompts: a stream as it arrives, a file as a whole."""
    if source is None:
        return [list(prompts or [""])]
    if _io.is_terminal(source):
        make_console(stderr=True).print("type a prompt; Ctrl-D ends the input")
    return _io.read_chunks(source) if _io.is_stream(source) else [_io.read_all(source)]


def _texts(number: int, prompt: str, outputs: Sequence[Continuation]) -> Iterator[str]:
    """Yield prompt and continuation, with a separator before every text but the first."""
    for rank, output in enumerate(outputs):
        if number or rank:
            yield _SEPARATOR
        yield prompt + output.text


def _json_lines(number: int, prompt: str, outputs: Sequence[Continuation]) -> Iterator[str]:
    for rank, output in enumerate(outputs, start=1):
        entry = {
            "line": number + 1,
            "prompt": prompt,
            "rank": rank,
            "log_probability": round(output.log_probability, 6),
            "text": output.text,
        }
        yield json.dumps(entry, ensure_ascii=False)
