"""`xformer translate`: one line in, one line out."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from xformer.cli.backend import BackendOption

if TYPE_CHECKING:
    from xformer.pipelines import Translator

HELP = """Translate text with the best model of a run: one line in, one line out, in the same order.

\b
A file     xformer translate --model run --input test.de --output out.en
A pipe     head -3 test.de | xformer translate --model run
By hand    xformer translate --model run

A line that you type, or that a slow pipe brings, is translated at once. Blank lines stay blank. An output file \
appears when it is whole. Decoding is greedy, with cached keys and values.
"""


def translate(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Directory of a run.", rich_help_panel="Text")],
    source: Annotated[
        str,
        typer.Option("--input", metavar="FILE", help="Text to translate; - is standard input.", rich_help_panel="Text"),
    ] = "-",
    output: Annotated[
        str,
        typer.Option("--output", metavar="FILE", help="Translations; - is standard output.", rich_help_panel="Text"),
    ] = "-",
    max_length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of a translation (default: twice the source sentence's plus 20). Those that reach it "
            "are counted on stderr.",
            rich_help_panel="Limits",
        ),
    ] = None,
    max_source_length: Annotated[
        int,
        typer.Option(
            min=1, help="Most tokens of a line of input; a longer one is an error, never cut.", rich_help_panel="Limits"
        ),
    ] = 1024,
    batch_tokens: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most tokens translated at once, padding included: memory against speed.",
            rich_help_panel="Limits",
        ),
    ] = 4096,
    backend: BackendOption = "numpy",
) -> None:
    """Translate lines of text."""
    from xformer.cli import streams
    from xformer.cli.console import make_console, plural

    translator = _load(model, backend)
    if streams.is_terminal(source):
        make_console(stderr=True).print("type a line to translate it; Ctrl-D ends")
    chunks: Iterable[list[Sequence[int]]] = _encoded(translator, source, max_source_length)
    if not streams.is_stream(source):
        chunks = list(chunks)  # so that nothing is written when the last line turns out to be bad
    num_cut = 0
    with streams.open_output(output) as write, _progress(output) as advance:
        for encoded in chunks:
            results = [""] * len(encoded)
            for batch in translator.batches_of_ids(encoded, batch_tokens=batch_tokens, max_length=max_length):
                for translation in batch:
                    results[translation.row] = translation.text
                    num_cut += translation.cut
                advance(len(batch))
            write(results)
    if num_cut:
        console = make_console(stderr=True)
        console.print(
            f"note: {plural(num_cut, 'translation')} reached the length limit and may lack an end (--max-length)"
        )


def _load(model: Path, backend: str) -> Translator:
    """Load a run into a library that is made ready for the dtype that the run was trained in."""
    from xformer.cli.backend import open_backend
    from xformer.pipelines import Translator
    from xformer.training import RunDirectory

    recipe = RunDirectory(model).read_config().get("recipe", {})
    settings = recipe.get("training", {})
    dtype = settings.get("dtype") if isinstance(settings, dict) else None
    return Translator.from_pretrained(model, xp=open_backend(backend, dtype))


def _encoded(translator: Translator, source: str, max_source_length: int) -> Iterator[list[Sequence[int]]]:
    """The token ids of the lines of the input, in chunks; what came before a line that is too long comes out first."""
    from xformer.cli import streams
    from xformer.pipelines import check_lengths

    name = streams.STANDARD_INPUT if source == streams.STANDARD else source
    first_number = 1
    for lines in streams.chunks(source):
        # A file is kept whole, at 4 bytes an id.
        encoded: list[Sequence[int]] = [array("i", ids) for ids in translator.encode(lines)]
        good = next((row for row, ids in enumerate(encoded) if len(ids) > max_source_length), len(encoded))
        if good:
            yield encoded[:good]
        check_lengths(encoded[good:], max_source_length, name=f"{name} line", first_number=first_number + good)
        first_number += len(lines)


@contextlib.contextmanager
def _progress(output: str) -> Iterator[Callable[[int], None]]:
    """Show how many lines are done, on a terminal that the translations themselves do not go to."""
    from xformer.cli.console import make_console

    console = make_console(stderr=True)
    if output == "-" or not console.is_terminal:
        yield lambda count: None
        return
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.completed:,} lines translated"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda count: progress.advance(task, count)
