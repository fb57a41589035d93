"""Lines of text in and out: files, standard input and standard output."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from xformer.errors import CheckpointError
from xformer.io import atomic_write, check_no_overwrite
from xformer.text import iter_lines, read_lines
from xformer.text.corpus import MAX_CHARACTERS

STANDARD = "-"
STANDARD_INPUT = "standard input"
_LINES_PER_CHUNK = 4096  # of a file; sorted by length and processed together
_BLOCK_BYTES = 65536

WriteLines = Callable[[list[str]], None]


def read_all(name: str) -> list[str]:
    """Return all lines of a file, or of standard input ("-"); raises what `read_lines` raises."""
    return read_lines(name) if name != STANDARD else list(iter_lines(sys.stdin.buffer, STANDARD_INPUT))


def is_stream(name: str) -> bool:
    """Return whether lines arrive over time: standard input that is a pipe or a terminal."""
    return name == STANDARD and not stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode)


def is_terminal(name: str) -> bool:
    """Return whether the lines are typed by hand."""
    return name == STANDARD and sys.stdin.isatty()


def read_chunks(name: str) -> Iterator[list[str]]:
    """Yield the lines of a file or of standard input ("-"), in order, in lists to be processed together.

    A file is read completely before the first chunk. A pipe or a terminal yields the lines that have arrived, so that
    a line typed by hand is processed at once.

    Raises:
        DataError: For invalid UTF-8 and lines that are too long, with the line number.
    """
    if is_stream(name):
        yield from _read_arriving(sys.stdin.buffer)
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


def check_output(name: str, source: str | None, protected: Iterable[Path]) -> None:
    """Raise ConfigError if `--output` would replace the input or one of the protected files."""
    if name == STANDARD:
        return
    inputs = [] if source is None else [sys.stdin.fileno() if source == STANDARD else source]
    check_no_overwrite(name, [*inputs, *protected], "--output")


@contextlib.contextmanager
def open_output(name: str) -> Iterator[WriteLines]:
    """Yield a function that writes lines to a file, which appears when it is complete, or to standard output ("-").

    Raises:
        CheckpointError: If the file cannot be written; an earlier file of that name is then unchanged.
    """
    if name == STANDARD:
        yield lambda lines: _write(sys.stdout.buffer, lines, flush=True)
        return
    # A symbolic link stays a link; a device or a pipe cannot be replaced and is written as lines arrive.
    path = Path(os.path.realpath(name))
    if path.is_dir():
        raise CheckpointError(f"cannot write {name}: it is a directory; expected the name of a file")
    special = path.exists() and not path.is_file()
    with path.open("wb") if special else atomic_write(path) as file:
        yield lambda lines: _write(file, lines, flush=special)


def _write(file: IO[bytes], lines: list[str], *, flush: bool) -> None:
    file.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
    if flush:
        file.flush()
