"""`xformer generate`: a language model goes on from prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from xformer.cli.backend import BackendOption
from xformer.cli.decoding import LENGTH, SAMPLE, SEARCH, option, utf8, with_some_decoding_options

HELP = """Continue prompts with the best model of a run of train-lm, and print prompt and continuation.

\b
A sample         xformer generate --model run
From a prompt    xformer generate --model run --prompt "ROMEO:" --seed 1
Three of each    xformer generate --model run --prompt "ROMEO:" --prompt "JULIET:" --num-return-sequences 3
Prompts, one a line, as lines of JSON
                 xformer generate --model run --input prompts.txt --json --output out.jsonl

Without a prompt the text begins after a line end, and so it does for an empty line of the input. Texts are sampled \
with temperature 0.8 from the 200 most probable tokens; any option of sampling, or --num-beams, replaces that, and \
--top-k 1 takes the most probable token each time. Several texts are parted by a line of dashes. The model sees as \
many tokens as it was trained on (context_length): a text that outgrows them goes on from its later half.
"""
# Those of translate that mean something without a source and without an end, and what differs.
_NAMES = (
    "num_beams", "num_return_sequences", "num_beam_groups", "diversity_penalty", "keep_greedy", "max_length", "topics", "topic_strength",
    "no_repeat_ngram_size", "repetition_penalty", "temperature", "top_k", "top_p", "min_p", "seed", "batch_tokens",
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
    ("max_length", Annotated[int, option(LENGTH, "Tokens to write.", min=1)], 500),
    (
        "temperature",
        Annotated[float | None, option(SAMPLE, "Logits are divided by it (default: 0.8, or 1 with other options).")],
        None,
    ),
]


@with_some_decoding_options(_NAMES, _INSTEAD)
def generate(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Directory of a run.", rich_help_panel="Text")],
    settings: dict[str, Any],
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--prompt",
            metavar="TEXT",
            help="What to go on from; may be repeated.",
            rich_help_panel="Text",
            callback=utf8,
        ),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE", help="Prompts, one a line; - is standard input.", rich_help_panel="Text"
        ),
    ] = None,
    output: Annotated[
        str, typer.Option("--output", metavar="FILE", help="Texts; - is standard output.", rich_help_panel="Text")
    ] = "-",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="One JSON object a line for each text: line, prompt, rank, log_probability, text (what follows).",
            rich_help_panel="Text",
        ),
    ] = False,
    backend: BackendOption = "numpy",
) -> None:
    """Continue prompts."""
    from xformer.cli.write_prompts import write_prompts

    write_prompts(model, prompt, source, output, as_json=as_json, backend=backend, settings=settings)
