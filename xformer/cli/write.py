"""What `translate` and `summarize` share: lines in, lines out, in the same order."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from xformer.cli import streams
from xformer.cli.backend import open_backend
from xformer.cli.console import make_console, plural
from xformer.pipelines import GenerationRequest, Output, TextGenerator, TextToText, check_source_lengths
from xformer.training import RunDirectory

Pipeline = TypeVar("Pipeline", TextToText, TextGenerator)


def write_lines(
    kind: type[TextToText], directory: Path, source: str, output: str, backend: str, settings: dict[str, Any]
) -> None:
    """Write an output for each line of the source.

    A stream is worked on as it comes; a file as a whole, so that nothing is written when its last line is bad.
    """
    request = GenerationRequest.of(**settings)
    streams.check_output(output, source, RunDirectory(directory).files())
    writer = load(kind, directory, backend)
    if streams.is_terminal(source):
        make_console(stderr=True).print("type a line; Ctrl-D ends")
    num_shortened: list[int] = []
    chunks: Iterable[list[Sequence[int]]] = _encoded(writer, source, request.max_source_length, num_shortened.append)
    total = None
    if not streams.is_stream(source):
        chunks = list(chunks)
        total = sum(1 for encoded in chunks for ids in encoded if ids)
    num_unfinished, done, plain = 0, 0, request.decoding.num_return_sequences == 1 and not request.align
    with streams.open_output(output) as write, _progress(output, total) as advance:
        for encoded in chunks:
            results: list[list[Output]] = [[] for _ in encoded]
            for batch in writer.batches_of_ids(encoded, request, first_number=done):
                for row, outputs in batch:
                    results[row] = outputs
                    num_unfinished += not outputs[0].finished
                advance(len(batch))
            rows = zip(encoded, results, itertools.count(done))
            write([line for ids, outputs, row in rows for line in _lines(writer, ids, outputs, row, plain)])
            done += len(encoded)
    if sum(num_shortened):
        make_console(stderr=True).print(
            f"note: {plural(sum(num_shortened), 'source')} of more than {writer.cut_length} tokens cut there, "
            "as in training"
        )
    if num_unfinished:
        remedy = "--max-length" if request.desired_length is None else "--num-beams, --length-tolerance"
        make_console(stderr=True).print(
            f"note: {plural(num_unfinished, 'output')} reached the length limit and may lack an end ({remedy})"
        )


def _lines(writer: TextToText, ids: Sequence[int], outputs: list[Output], row: int, plain: bool) -> Iterator[str]:
    """What is written for one line: a text, or a JSON object for each output."""
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
            entry["source_tokens"] = writer.tokenizers.source.tokens([*ids, writer.model.config.eos_id])
            entry["tokens"] = writer.tokenizers.target.tokens(output.tokens)
            entry["alignment"] = output.alignment
        yield json.dumps(entry, ensure_ascii=False)


def load(kind: type[Pipeline], directory: Path, backend: str) -> Pipeline:
    """Load a run into a library that is made ready for the dtype that the run was trained in."""
    recipe = RunDirectory(directory).read_config().get("recipe", {})
    settings = recipe.get("training", {})
    dtype = settings.get("dtype") if isinstance(settings, dict) else None
    return kind.from_pretrained(directory, xp=open_backend(backend, dtype))


def _encoded(
    writer: TextToText, source: str, max_source_length: int, tell: Callable[[int], None]
) -> Iterator[list[Sequence[int]]]:
    """The token ids of the lines of the input, in chunks; what came before a line that is too long comes out first."""
    name = streams.STANDARD_INPUT if source == streams.STANDARD else source
    first_number = 1
    for lines in streams.chunks(source):
        # A file is kept whole, at 4 bytes an id.
        whole, num_shortened = writer.cut(writer.encode(lines))
        tell(num_shortened)
        encoded: list[Sequence[int]] = [array("i", ids) for ids in whole]
        good = next((row for row, ids in enumerate(encoded) if len(ids) > max_source_length), len(encoded))
        if good:
            yield encoded[:good]
        check_source_lengths(encoded[good:], max_source_length, name=f"{name} line", first_number=first_number + good)
        first_number += len(lines)


@contextlib.contextmanager
def _progress(output: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how many lines are done, of how many where that is known, on a terminal that the outputs do not go to."""
    console = make_console(stderr=True)
    if not console.is_terminal or (output == streams.STANDARD and sys.stdout.isatty()):
        yield lambda count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    lines = TextColumn(
        "{task.completed:,} lines done" if total is None else "{task.completed:,} of {task.total:,} lines"
    )
    columns = (lines, TimeElapsedColumn()) if total is None else (BarColumn(), lines, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)
