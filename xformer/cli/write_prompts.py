"""What `generate` does: prompts in, texts out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from xformer.cli import streams
from xformer.cli.console import make_console
from xformer.cli.write import load
from xformer.errors import ConfigError
from xformer.pipelines import Continuation, TextGenerator
from xformer.training import RunDirectory

_DASHES = "-" * 15


def write_prompts(
    directory: Path,
    given: Sequence[str] | None,
    source: str | None,
    output: str,
    *,
    as_json: bool,
    backend: str,
    settings: dict[str, Any],
) -> None:
    """Write a text for each prompt that was given, or for each line of the source.

    A stream is worked on as it comes; a file as a whole, so that nothing is written when its last line is bad.
    """
    if given and source is not None:
        raise ConfigError("--prompt and --input are both given; expected one or the other: leave one out")
    streams.check_output(output, source, RunDirectory(directory).files())
    writer = load(TextGenerator, directory, backend)
    writer.request(**settings)  # what contradicts itself is said before anything is read
    number = 0
    with streams.open_output(output) as write:
        for prompts in _prompts(given, source):
            found = writer.continuations(prompts, first_number=number, **settings)
            for prompt, outputs in zip(prompts, found, strict=True):
                write(list(_json_lines(number, prompt, outputs) if as_json else _texts(number, prompt, outputs)))
                number += 1


def _prompts(given: Sequence[str] | None, source: str | None) -> Iterable[list[str]]:
    if source is None:
        return [list(given or [""])]
    if streams.is_terminal(source):
        make_console(stderr=True).print("type a prompt; Ctrl-D ends")
    return streams.chunks(source) if streams.is_stream(source) else [streams.read_all(source)]


def _texts(number: int, prompt: str, outputs: Sequence[Continuation]) -> Iterator[str]:
    """Prompt and continuation, with dashes between a text and the one before it."""
    for rank, output in enumerate(outputs):
        if number or rank:
            yield _DASHES
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
