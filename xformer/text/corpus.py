r"""Text files with one sentence per line, alone, as parallel pairs, or in chunks.

Only "\n" ends a line: `str.splitlines` would also split at controls and line separators (U+0085, U+2028)
inside a sentence and silently shift one side of a parallel corpus against the other.
"""

from __future__ import annotations

import codecs
import contextlib
import copy
import hashlib
import io
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

from xformer.errors import DataError
from xformer.io import StrPath

# Far above any sentence; a longer line means that the file does not have one sentence per line.
MAX_CHARACTERS = 100_000
_CHUNK_LINES = 10_000
_TEXT_SIZE = 1 << 22
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs: `target[i]` is the translation of `source[i]`.

    Attributes:
        source: Source sentences.
        target: Target sentences.
        num_dropped: Number of pairs left out by `read_parallel` (one side blank) or `select`.
        line_numbers: Line of each pair in its files, from 1; empty means 1, 2, 3, ...
        names: Names of the two sides in errors.

    Raises:
        DataError: If the columns differ in length.
    """

    source: list[str]
    target: list[str]
    num_dropped: int = 0
    line_numbers: Sequence[int] = ()
    names: tuple[str, str] = ("source", "target")

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            received = f"source has {len(self.source)} lines and target {len(self.target)}"
            raise DataError(f"{received}; expected one target for each source")
        if self.line_numbers and len(self.line_numbers) != len(self.source):
            problem = f"got {len(self.line_numbers)} line numbers for {len(self.source)} pairs"
            raise DataError(f"{problem}; expected one each")

    def __len__(self) -> int:
        return len(self.source)

    def select(self, indices: Sequence[int]) -> ParallelCorpus:
        """Return the pairs at `indices` (from 0), with their line numbers; all others count as dropped."""
        columns: Any = self.source, self.target, self.line_numbers or range(1, len(self) + 1)
        source, target, numbers = ([column[index] for index in indices] for column in columns)
        return ParallelCorpus(source, target, self.num_dropped + len(self) - len(indices), numbers, self.names)


def one_line(text: str) -> str:
    r"""Return a text with a space in place of each line separator: those of `str.splitlines`.

    Examples:
        >>> one_line("a\nb\u2028c\n")
        'a b c'
    """
    return " ".join(text.splitlines())


def iter_lines(
    file: IO[bytes], name: StrPath, *, max_characters: int = MAX_CHARACTERS, first_number: int = 1
) -> Iterator[str]:
    """Yield the lines of a binary file, such as `sys.stdin.buffer`, as they arrive, without their line ends.

    A byte-order mark at the start and a carriage return at the end of a line are dropped.

    Args:
        file: The open file.
        name: Name of the file in errors.
        max_characters: Largest length of a line.
        first_number: Number of the first line, if lines were read before.

    Raises:
        DataError: For invalid UTF-8 and lines of more than `max_characters`, with the line number.
    """
    # A character takes at most 4 bytes; the rest is for the byte-order mark and the line end. Reading no more than
    # that bounds the memory taken by a file without line ends.
    max_bytes = 4 * max_characters + len(codecs.BOM_UTF8) + len(b"\r\n")
    for number in itertools.count(first_number):
        raw = file.readline(max_bytes + 1)
        if number == 1:
            _reject_binary_formats(raw, name)
            raw = raw.removeprefix(codecs.BOM_UTF8)
        if not raw:
            return
        is_cut = len(raw) > max_bytes and not raw.endswith(b"\n")
        line = "" if is_cut else _decode(raw.removesuffix(b"\n").removesuffix(b"\r"), name, number)
        if is_cut or len(line) > max_characters:
            received = f"{name} line {number} has more than {max_characters} characters"
            raise DataError(f"{received}; expected one sentence per line; split the line")
        yield line


def _reject_binary_formats(raw: bytes, name: StrPath) -> None:
    """Raise DataError for gzip and UTF-16 files, the most frequent mistakes."""
    if raw.startswith(b"\x1f\x8b"):
        raise DataError(f"{name} is gzip-compressed; expected UTF-8 text; unpack it first (gunzip)")
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{name} is UTF-16; expected UTF-8; convert it with: iconv -f UTF-16 -t UTF-8")


def _decode(raw: bytes, name: StrPath, number: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not valid UTF-8: line {number}, byte {error.start + 1} is 0x{raw[error.start]:02x} "
            f"({error.reason}); expected UTF-8; convert it, for example with: iconv -f LATIN1 -t UTF-8"
        ) from error


@contextlib.contextmanager
def open_text(path: StrPath) -> Iterator[IO[bytes]]:
    """Open a file; raise DataError if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            yield file
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot read {path}: {reason}; expected a UTF-8 text file; check the path") from error


def is_empty(path: StrPath) -> DataError:
    """Return the error for an empty file."""
    return DataError(f"{path} is empty; expected UTF-8 text, one sentence per line")


def read_lines(path: StrPath, *, max_characters: int = MAX_CHARACTERS) -> list[str]:
    """Read a UTF-8 file of one sentence per line.

    Blank lines are kept, so that line numbers hold. A byte-order mark at the start and a carriage return at the end of
    a line are dropped.

    Args:
        path: The file.
        max_characters: Largest length of a line.

    Raises:
        DataError: For a missing, unreadable or empty file, and (with the line number) for invalid UTF-8 and lines of
            more than `max_characters`.
    """
    with open_text(path) as file:
        lines = list(iter_lines(file, path, max_characters=max_characters))
    if not lines:
        raise is_empty(path)
    return lines


def read_text(path: StrPath) -> str:
    """Read a UTF-8 file as one text, line ends included, for language models.

    A byte-order mark at the start and the carriage return of a line end are dropped.

    Raises:
        DataError: For a missing, unreadable or blank file, and (with the line number) for invalid UTF-8.
    """
    return "".join(TextPart([path]))


class TextPart:
    """A part of the text that is the content of files, as `read_text` reads them. Iterating it yields pieces.

    A piece begins with a space, as far as possible, so that the tokens of the pieces are those of the text.

    Args:
        paths: The files.
        start: First character.
        stop: End of the characters; None for all.
        size: Approximate number of characters of a piece.

    Raises:
        DataError: For a missing, unreadable or blank file, and (with the line number) for invalid UTF-8.
    """

    def __init__(
        self, paths: Sequence[StrPath], start: int = 0, stop: int | None = None, size: int = _TEXT_SIZE
    ) -> None:
        self.paths, self.start, self.size = paths, start, size
        self.stop = sum(map(len, self._pieces())) if stop is None else stop

    def __len__(self) -> int:
        return self.stop - self.start

    def split(self, share: float) -> tuple[TextPart, TextPart]:
        """Split off the end, a fraction of the characters, for validation, as nanoGPT does."""
        middle = self.start + max(1, int(len(self) * (1.0 - share)))
        first = TextPart(self.paths, self.start, middle, self.size)
        return first, TextPart(self.paths, middle, self.stop, self.size)

    def __iter__(self) -> Iterator[str]:
        end = 0
        for piece in self._pieces():
            begin, end = end, end + len(piece)
            if begin < self.stop and end > self.start:
                yield piece[max(0, self.start - begin) : self.stop - begin]

    def _pieces(self) -> Iterator[str]:
        text = ""
        for path in self.paths:
            is_blank = True
            for lines in _read_blocks(path, self.size):
                text += lines
                is_blank = is_blank and not lines.strip()
                if len(text) > self.size and (end := text.rfind(" ")) > 0:
                    yield text[:end]
                    text = text[end:]
            if is_blank:
                raise DataError(f"{path} is empty; expected UTF-8 text")
        yield text


def _read_blocks(path: StrPath, size: int) -> Iterator[str]:
    """Yield lines of a file, with their ends, joined to about `size` characters."""
    number = 1
    with open_text(path) as file:
        while lines := file.readlines(size):
            if number == 1:
                _reject_binary_formats(lines[0], path)
                lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
            decoded = [_decode(line, path, index) for index, line in enumerate(lines, start=number)]
            yield "".join(decoded).replace("\r\n", "\n")
            number += len(lines)


def read_parallel(
    source_path: StrPath, target_path: StrPath, *, max_characters: int = MAX_CHARACTERS
) -> ParallelCorpus:
    """Read two files in which line n of one translates line n of the other.

    Pairs with a blank side are dropped and counted in `num_dropped`.

    Args:
        source_path: File of source sentences.
        target_path: File of target sentences.
        max_characters: Largest length of a line.

    Raises:
        DataError: If `read_lines` rejects a file, the line counts differ, or no pair remains.
    """
    chunks = list(ParallelFiles([source_path], [target_path], max_characters=max_characters))
    columns = zip(*((chunk.source, chunk.target, chunk.line_numbers) for chunk in chunks), strict=True)
    source, target, numbers = (list(itertools.chain.from_iterable(column)) for column in columns)
    return ParallelCorpus(source, target, sum(chunk.num_dropped for chunk in chunks), numbers, chunks[0].names)


class ParallelFiles:
    """Pairs of lines of one or more pairs of files, as `read_parallel` reads them. Iterating it yields chunks.

    Args:
        sources: Files of source sentences.
        targets: Files of target sentences.
        max_characters: Largest length of a line.
    """

    def __init__(
        self, sources: Sequence[StrPath], targets: Sequence[StrPath], *, max_characters: int = MAX_CHARACTERS
    ) -> None:
        if len(sources) != len(targets):
            raise DataError(f"got {len(sources)} source and {len(targets)} target files; expected equal numbers")
        self.names = list(zip(map(str, sources), map(str, targets), strict=True))
        self.max_characters = max_characters
        self._mask: Any = None

    @property
    def source(self) -> Iterator[str]:
        """Source sentences."""
        return itertools.chain.from_iterable(chunk.source for chunk in self)

    @property
    def target(self) -> Iterator[str]:
        """Target sentences."""
        return itertools.chain.from_iterable(chunk.target for chunk in self)

    def split(self, mask: Any) -> tuple[ParallelFiles, ParallelFiles]:
        """Return the pairs without those that a NumPy array of booleans, one for each pair, selects, and those."""
        parts = copy.copy(self), copy.copy(self)
        parts[0]._mask, parts[1]._mask = ~mask, mask
        return parts

    def __iter__(self) -> Iterator[ParallelCorpus]:
        mask = iter(itertools.repeat(True) if self._mask is None else self._mask)
        for names in self.names:
            num_pairs = 0
            for chunk in _read_chunks(names, self.max_characters):
                pairs = enumerate(zip(chunk.source, chunk.target, strict=True))
                nonblank = [index for index, pair in pairs if all(line.strip() for line in pair)]
                num_pairs += len(nonblank)
                part = chunk.select(list(itertools.compress(nonblank, mask)))
                yield replace(part, num_dropped=len(chunk) - len(nonblank))
            if not num_pairs:
                received = f"{names[0]} and {names[1]} have no line with text on both sides"
                raise DataError(f"{received}; expected one sentence per line")


def _read_chunks(names: tuple[str, str], max_characters: int) -> Iterator[ParallelCorpus]:
    """Yield the lines of two files, blank ones included."""
    with open_text(names[0]) as source, open_text(names[1]) as target:
        files = zip((source, target), names, strict=True)
        readers = [iter_lines(*each, max_characters=max_characters) for each in files]
        counts = [0, 0]
        while True:
            first = counts[0] + 1
            lines = [list(itertools.islice(reader, _CHUNK_LINES)) for reader in readers]
            counts = [count + len(each) for count, each in zip(counts, lines, strict=True)]
            for name, count in zip(names, counts, strict=True):
                if not count:
                    raise is_empty(name)
            if counts[0] != counts[1]:
                counts = [count + sum(1 for _ in reader) for count, reader in zip(counts, readers, strict=True)]
                received = f"{names[0]} has {counts[0]} lines and {names[1]} has {counts[1]}"
                raise DataError(f"{received}; expected the same number: line n of one translates line n of the other")
            if not lines[0]:
                return
            yield ParallelCorpus(lines[0], lines[1], 0, range(first, counts[0] + 1), names)


# --- Chunks of a large file -------------------------------------------------------------------------------------------


class LineChunk(NamedTuple):
    """Consecutive lines of a file.

    Attributes:
        path: Absolute path of the file.
        first_index: Index of the first line, from 0.
        num_lines: Number of lines.
        start: Offset of the first byte.
        stop: Offset after the last byte.
        digest: Digest of the bytes.
    """

    path: Path
    first_index: int
    num_lines: int
    start: int
    stop: int
    digest: bytes

    def read(self) -> list[str]:
        """Read the lines; they may have any length.

        Raises:
            DataError: If the file has changed.
            OSError: If it cannot be read.
        """
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(self.stop - self.start)
        if _digest(data).digest() != self.digest:
            raise DataError(
                f"lines {self.first_index + 1} to {self.first_index + self.num_lines} of {self.path} have changed "
                "since the run started; restore the file"
            )
        number = self.first_index + 1
        return list(iter_lines(io.BytesIO(data), self.path, max_characters=len(data), first_number=number))


def line_chunks(path: StrPath, chunk_lines: int) -> list[LineChunk]:
    """Return the chunks of a file of UTF-8 text, found in one pass over it with the memory of the text of a chunk.

    Args:
        path: The file.
        chunk_lines: Lines of each chunk; the last one may have fewer.

    Raises:
        DataError: For a missing, unreadable or empty file, and (with the line number) for invalid UTF-8.
    """
    chunks, first_index, start, absolute = list[LineChunk](), 0, 0, Path(os.path.abspath(path))
    with open_text(path) as file:
        while lines := list(itertools.islice(file, chunk_lines)):
            data = b"".join(lines)
            try:
                data.decode()
            except UnicodeDecodeError:  # find the number of the line
                list(iter_lines(io.BytesIO(data), path, max_characters=len(data), first_number=first_index + 1))
            stop = start + len(data)
            chunks.append(LineChunk(absolute, first_index, len(lines), start, stop, _digest(data).digest()))
            first_index, start = first_index + len(lines), stop
    if not chunks or (start == len(codecs.BOM_UTF8) and data == codecs.BOM_UTF8):
        raise is_empty(path)
    return chunks


def digest_of(chunks: Sequence[LineChunk]) -> str:
    """Return a digest of the content of a file, and of the number of lines of a chunk."""
    return str(_digest(b"".join(chunk.digest for chunk in chunks)).hexdigest())


def _digest(data: bytes) -> Any:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)
