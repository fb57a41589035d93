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

from xformer.errors import CheckpointError, DataError
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
    if name != STANDARD:
        return read_lines(name)
    try:
        return list(iter_lines(_standard_input().buffer, STANDARD_INPUT))
    except OSError as error:
        raise _unreadable(error) from error


def is_stream(name: str) -> bool:
    """Return whether lines arrive over time: standard input that is a pipe or a terminal.

    Raises:
        DataError: If standard input is closed.
    """
    if name != STANDARD:
        return False
    stream = _standard_input()
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # replaced by an object in memory, for example by a test
        return False


def is_terminal(name: str) -> bool:
    """Return whether the lines are typed by hand; raises DataError if standard input is closed."""
    return name == STANDARD and bool(_standard_input().isatty())


def _standard_input() -> Any:
    stream = sys.stdin  # None in a process that was started without it (`<&-`)
    if stream is None or getattr(stream, "closed", False):
        raise DataError(f"{STANDARD_INPUT} is closed; expected text with one sentence per line, or a file name")
    return stream


def _unreadable(error: OSError) -> DataError:
    return DataError(f"cannot read {STANDARD_INPUT}: {error.strerror or error}; expected text, or a file name")


def read_chunks(name: str) -> Iterator[list[str]]:
    """Yield the lines of a file or of standard input ("-"), in order, in lists to be processed together.

    A file is read completely before the first chunk. A pipe or a terminal yields the lines that have arrived, so that
    a line typed by hand is processed at once; lines before an invalid one are yielded before the error is raised.

    Raises:
        DataError: For invalid UTF-8 and lines that are too long, with the line number.
    """
    if is_stream(name):
        yield from _read_arriving(_standard_input().buffer)
        return
    lines = read_all(name)
    for start in range(0, len(lines), _LINES_PER_CHUNK):
        yield lines[start : start + _LINES_PER_CHUNK]


def _read_arriving(stream: IO[bytes]) -> Iterator[list[str]]:
    first_number, pending = 1, b""
    while True:
        try:
            block = stream.read1(_BLOCK_BYTES)  # type: ignore[attr-defined]
        except OSError as error:
            raise _unreadable(error) from error
        complete, newline, pending = (pending + block).rpartition(b"\n")
        if not block or len(pending) > 4 * MAX_CHARACTERS:  # a last line without an end, or a line that is too long
            complete, newline, pending = complete + newline + pending, b"", b""
        lines: list[str] = []
        try:
            for line in iter_lines(io.BytesIO(complete + newline), STANDARD_INPUT, first_number=first_number):
                lines.append(line)
        except DataError:
            if lines:
                yield lines
            raise
        if lines:
            yield lines
        first_number += len(lines)
        if not block:
            return


def check_output(name: str, source: str | None, protected: Iterable[Path]) -> None:
    """Raise ConfigError if `--output` would replace the input or one of the protected files."""
    if name == STANDARD:
        return
    inputs: list[str | int] = [] if source is None else [source]
    if source == STANDARD:
        with contextlib.suppress(OSError, ValueError, DataError):  # closed, or replaced by an object in memory
            inputs = [_standard_input().fileno()]
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
