"""Input and output of commands: pipelines, and lines of text in files, standard input and standard output.

Also the progress that they show, and how to call this program.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from xformer.errors import ConfigError
from xformer.families.checkpoint import is_public
from xformer.families.run_directory import RunDirectory
from xformer.io import atomic_write, check_no_overwrite, descriptor_of, is_device, unwritable_parent
from xformer.runs.backend import open_backend
from xformer.runs.console import progress_bar
from xformer.text import iter_lines, read_lines
from xformer.text.corpus import MAX_CHARACTERS

STANDARD = "-"
STANDARD_INPUT = "standard input"
_LINES_PER_CHUNK = 4096  # of a file; sorted by length and processed together
_BLOCK_BYTES = 65536

WriteLines = Callable[[list[str]], None]


def program() -> str:
    """Return the command that runs this program again: "xformer", or a path to it."""
    invoked = Path(sys.argv[0])
    if invoked.name == "__main__.py":
        return f"{Path(sys.executable).name} -m xformer"
    # A nox session puts its environment on the path, but only while it runs.
    is_on_path = "NOX_CURRENT_SESSION" not in os.environ and shutil.which("xformer")
    if is_on_path or invoked.name != "xformer":
        return "xformer"
    try:
        return os.path.relpath(invoked)
    except ValueError:  # on another drive of Windows
        return str(invoked)


def quote(path: Path) -> str:
    """Return a path as an argument of a command, quoted for the usual shells of the system if necessary."""
    return subprocess.list2cmdline([path]) if os.name == "nt" else shlex.quote(str(path))


@contextlib.contextmanager
def percent_progress(text: str, *, visible: bool = True) -> Iterator[Callable[[float, float], None]]:
    """Show the percentage of a task on stderr, if it is a terminal; yields a function of the parts done and all parts.

    Args:
        text: Description of the task, e.g. "loading".
        visible: Pass False if the output goes to the same terminal.
    """
    with progress_bar(text, total=1.0, visible=visible) as update:
        yield lambda done, total: update(description=f"{text}  {100 * done / total:.0f} %", completed=done / total)


def fields_of(output: Any, *names: str) -> dict[str, Any]:
    """Return fields of an output for JSON, with rounded numbers."""
    values = {name: getattr(output, name) for name in names}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def load_pipeline(pipeline_type: Any, directory: Path, backend: str, *, visible: bool = True, **options: Any) -> Any:
    """Load a public checkpoint, or a run with a backend that is prepared for the data type of its model."""
    recipe = {} if is_public(directory) else RunDirectory(directory).read_config().get("recipe", {})
    xp = open_backend(backend, recipe.get("training", {}).get("dtype"))
    with percent_progress("loading", visible=visible) as progress:
        return pipeline_type.from_pretrained(directory, xp=xp, progress=progress, **options)


def read_all(name: str) -> list[str]:
    """Return all lines of a file, or of standard input ("-"); raises what `read_lines` raises."""
    return read_lines(name) if name != STANDARD else list(iter_lines(_stdin().buffer, STANDARD_INPUT))


def is_stream(name: str) -> bool:
    """Return whether lines arrive over time: standard input that is a pipe or a terminal."""
    return name == STANDARD and not stat.S_ISREG(os.fstat(_stdin().fileno()).st_mode)


def is_terminal(name: str) -> bool:
    """Return whether the lines are typed by hand."""
    return name == STANDARD and _stdin().isatty()


def _stdin() -> Any:
    if sys.stdin is None:
        raise ConfigError("standard input is closed; expected text; name a file, or connect it")
    return sys.stdin


def read_chunks(name: str) -> Iterator[list[str]]:
    """Yield the lines of a file or of standard input ("-"), in order, in lists to be processed together.

    A file is read completely before the first chunk. A pipe or a terminal yields the lines that have arrived, so that
    a line typed by hand is processed at once.

    Raises:
        DataError: For invalid UTF-8 and lines that are too long, with the line number.
    """
    if is_stream(name):
        yield from _read_arriving(_stdin().buffer)
        return
    lines = read_all(name)
    for start in range(0, len(lines), _LINES_PER_CHUNK):
        yield lines[start : start + _LINES_PER_CHUNK]


def _read_arriving(stream: Any) -> Iterator[list[str]]:
    first_number, pending, block = 1, b"", b"\n"
    while block:
        block = stream.read1(_BLOCK_BYTES)
        complete, newline, pending = (pending + block).rpartition(b"\n")
        if not block or len(pending) > 4 * MAX_CHARACTERS:  # a last line without an end, or a line that is too long
            complete, newline, pending = complete + newline + pending, b"", b""
        lines = list(iter_lines(io.BytesIO(complete + newline), STANDARD_INPUT, first_number=first_number))
        first_number += len(lines)
        if lines:
            yield lines


def check_output(name: str, inputs: Iterable[str | Path | None], *models: Path | None) -> None:
    """Check `--output` before anything is computed.

    Args:
        name: Path of the output, or "-".
        inputs: Paths of the inputs, "-", or None.
        *models: Directories of models, or None.

    Raises:
        ConfigError: If it is closed or cannot be written, or would replace an input or a file of a model.
    """
    if sys.__stdout__ is None and (name == STANDARD or descriptor_of(name) == 1):
        raise ConfigError("standard output is closed; expected a place for the output; add --output FILE")
    if name == STANDARD:
        return
    check_writable(name)
    protected = [_stdin().fileno() if each == STANDARD else each for each in inputs if each is not None]
    for model in filter(None, models):
        protected += [model, *RunDirectory(model).files(), *model.glob("*.safetensors")]
    check_no_overwrite(name, protected, "--output")


def check_writable(path: str) -> None:
    """Raise ConfigError for a directory, and for a file in a directory that is not writable."""
    if os.path.isdir(path):
        raise ConfigError(f"cannot write {path}: it is a directory; expected the name of a file")
    parent = None if is_device(path) else unwritable_parent(Path(os.path.realpath(path)))
    if parent is not None:
        raise ConfigError(f"cannot write {path}: {parent} is not a writable directory")


def open_bytes(name: str) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open a file, which appears when it is complete, a pipe or a device, or standard output ("-").

    Raises:
        CheckpointError: If it cannot be written; an earlier file of that name is then unchanged.
    """
    return contextlib.nullcontext(sys.stdout.buffer) if name == STANDARD else atomic_write(name)


@contextlib.contextmanager
def open_output(name: str) -> Iterator[WriteLines]:
    """Yield a function that writes lines, at once, to what `open_bytes` opens."""
    with open_bytes(name) as file:

        def write(lines: list[str]) -> None:
            file.write("".join(f"{line}\n" for line in lines).encode())
            file.flush()

        yield write
