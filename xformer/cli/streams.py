"""Lines in and lines out: files, standard input and output, and pipes that are slow."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from xformer.errors import CheckpointError, DataError
from xformer.io import atomic_write, check_no_overwrite
from xformer.text import iter_lines, read_lines

STANDARD = "-"
STANDARD_INPUT = "standard input"
# Lines that are sorted by length and translated together; output appears after each such chunk.
_CHUNK_LINES = 4096
_READ_BYTES = 65536

Write = Callable[[list[str]], None]


def read_all(name: str) -> list[str]:
    """Read all lines of a file, or of standard input ("-"); raises DataError for what `read_lines` rejects."""
    if name != STANDARD:
        return read_lines(name)
    file = _standard_input().buffer
    try:
        return list(iter_lines(file, STANDARD_INPUT))
    except OSError as error:
        raise _unreadable(error) from error


def is_stream(name: str) -> bool:
    """Tell whether lines arrive over time: standard input that is a pipe or a terminal.

    Raises DataError for standard input that is closed.
    """
    if name != STANDARD:
        return False
    stream = _standard_input()
    try:
        return not stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):  # standard input that was replaced, by a test for example, is all there
        return False


def is_terminal(name: str) -> bool:
    """Tell whether someone is to type the lines; raises DataError for standard input that is closed."""
    return name == STANDARD and bool(_standard_input().isatty())


def _standard_input() -> Any:
    """`sys.stdin`, which is None in a process that was started without it (`<&-`)."""
    stream = sys.stdin
    if stream is None or getattr(stream, "closed", False):
        raise DataError(f"{STANDARD_INPUT} is closed; expected text, one sentence a line; pipe it in, or name a file")
    return stream


def _unreadable(error: OSError) -> DataError:
    return DataError(
        f"cannot read {STANDARD_INPUT}: {error.strerror or error}; expected text, one sentence a line; pipe it in, or "
        "name a file"
    )


def chunks(name: str) -> Iterator[list[str]]:
    """Yield the lines of a file or of standard input, in order, in lists that may be translated at once.

    A file is read and checked as a whole first. From a pipe or a terminal, a chunk is what is there: a user who types
    a line need not wait for more. What came before a bad line is yielded before the error is raised.

    Raises DataError, with the line number, for invalid UTF-8 and overlong lines.
    """
    if is_stream(name):
        yield from _arriving(ArrivingLines(_standard_input().fileno()))
        return
    lines = read_all(name)
    for start in range(0, len(lines), _CHUNK_LINES):
        yield lines[start : start + _CHUNK_LINES]


def _arriving(source: ArrivingLines) -> Iterator[list[str]]:
    lines = iter_lines(source, STANDARD_INPUT)  # type: ignore[arg-type]
    while True:
        chunk: list[str] = []
        failure: DataError | None = None
        ended = False
        try:
            while not chunk or (len(chunk) < _CHUNK_LINES and source.ready()):
                chunk.append(next(lines))
        except StopIteration:
            ended = True
        except DataError as error:
            failure = error
        if chunk:
            yield chunk
        if failure:
            raise failure
        if ended:
            return


class ArrivingLines:
    """A file descriptor read line by line that can tell whether the next line is there already."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._ended = False

    def readline(self, size: int) -> bytes:
        """Return up to the next line end, at most `size` bytes, waiting for them; nothing at the end."""
        searched = 0
        while not self._ended and len(self._buffer) < size and self._buffer.find(b"\n", searched) < 0:
            searched = len(self._buffer)
            self._fill()
        end = self._buffer.find(b"\n", 0, size)
        taken = min(size, len(self._buffer)) if end < 0 else end + 1
        line = bytes(self._buffer[:taken])
        del self._buffer[:taken]
        return line

    def ready(self) -> bool:
        """Tell whether `readline` would return a line at once."""
        while b"\n" not in self._buffer and not self._ended:
            if not select.select([self._descriptor], [], [], 0)[0]:
                return False
            self._fill()
        return bool(self._buffer)

    def _fill(self) -> None:
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except OSError as error:
            raise _unreadable(error) from error
        self._ended = not data
        self._buffer += data


def check_output(name: str, source: str | None, kept: Iterable[Path]) -> None:
    """Raise ConfigError where `--output` would replace the source, or what is to be kept."""
    if name == STANDARD:
        return
    read: list[str | int] = [] if source is None else [source]
    if source == STANDARD:
        with contextlib.suppress(OSError, ValueError, DataError):  # closed, or replaced
            read = [_standard_input().fileno()]
    check_no_overwrite(name, [*read, *kept], "--output")


@contextlib.contextmanager
def open_output(name: str) -> Iterator[Write]:
    """Give a function that writes lines to a file, which appears once it is whole, or to standard output ("-").

    Raises CheckpointError when the file cannot be written; what stood there before is then untouched.
    """
    if name == STANDARD:
        yield lambda lines: _write(sys.stdout.buffer, lines, flush=True)
        return
    # A link stays a link; a device or a pipe cannot be exchanged for a file, and takes lines as they come.
    path = Path(os.path.realpath(name))
    if path.is_dir():
        raise CheckpointError(f"cannot write {name}: it is a directory; give the name of a file")
    special = path.exists() and not path.is_file()
    with path.open("wb") if special else atomic_write(path) as file:
        yield lambda lines: _write(file, lines, flush=special)


def _write(file: IO[bytes], lines: list[str], *, flush: bool) -> None:
    file.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
    if flush:
        file.flush()
