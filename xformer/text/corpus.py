r"""Text files with one sentence per line, alone or as parallel pairs.

Only "\n" ends a line: `str.splitlines` would also split at controls and line separators (U+0085, U+2028)
inside a sentence and silently shift one side of a parallel corpus against the other.
"""

from __future__ import annotations

import codecs
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from xformer.errors import ConfigError, DataError

PathName = str | os.PathLike[str]

# Far above any sentence; a longer line means that the file does not have one sentence per line.
MAX_CHARACTERS = 100_000

# Treatments of lines with too many tokens.
TRUNCATION_MODES = ("error", "drop", "cut")


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs: `target[i]` is the translation of `source[i]`.

    Attributes:
        source: Source sentences.
        target: Target sentences.
        num_dropped: Number of pairs left out by `read_parallel` (one side blank) or `select`.
        line_numbers: Line of each pair in its files, from 1; empty means 1, 2, 3, ...

    Raises:
        DataError: If the columns differ in length.
    """

    source: list[str]
    target: list[str]
    num_dropped: int = 0
    line_numbers: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise DataError(
                f"source has {len(self.source)} lines and target {len(self.target)}; "
                "expected one target for each source"
            )
        if self.line_numbers and len(self.line_numbers) != len(self.source):
            raise DataError(
                f"got {len(self.line_numbers)} line numbers for {len(self.source)} pairs; expected one each"
            )

    def __len__(self) -> int:
        return len(self.source)

    def select(self, indices: Sequence[int]) -> ParallelCorpus:
        """Return the pairs at `indices` (from 0), with their line numbers; all others count as dropped."""
        numbers = self.line_numbers or range(1, len(self) + 1)
        return ParallelCorpus(
            [self.source[index] for index in indices],
            [self.target[index] for index in indices],
            self.num_dropped + len(self) - len(indices),
            [numbers[index] for index in indices],
        )


def one_line(text: str) -> str:
    r"""Return a text with a space in place of each line separator: those of `str.splitlines`.

    >>> one_line("a\nb\u2028c\n")
    'a b c'
    """
    return " ".join(text.splitlines())


def iter_lines(
    file: IO[bytes], name: PathName, *, max_characters: int = MAX_CHARACTERS, first_number: int = 1
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
            raise DataError(
                f"{name} line {number} has more than {max_characters} characters; "
                "expected one sentence per line; split the line"
            )
        yield line


def _reject_binary_formats(raw: bytes, name: PathName) -> None:
    """Raise DataError for gzip and UTF-16 files, the most frequent mistakes."""
    if raw.startswith(b"\x1f\x8b"):
        raise DataError(f"{name} is gzip-compressed; expected UTF-8 text; unpack it first (gunzip)")
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{name} is UTF-16; expected UTF-8; convert it with: iconv -f UTF-16 -t UTF-8")


def _decode(raw: bytes, name: PathName, number: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name} is not valid UTF-8: line {number}, byte {error.start + 1} is 0x{raw[error.start]:02x} "
            f"({error.reason}); expected UTF-8; convert it, for example with: iconv -f LATIN1 -t UTF-8"
        ) from error


def _cannot_read(path: PathName, error: OSError) -> str:
    return f"cannot read {path}: {error.strerror or error}; expected a UTF-8 text file; check the path"


def read_lines(path: PathName, *, max_characters: int = MAX_CHARACTERS) -> list[str]:
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
    try:
        with Path(path).open("rb") as file:
            lines = list(iter_lines(file, path, max_characters=max_characters))
    except OSError as error:
        raise DataError(_cannot_read(path, error)) from error
    if not lines:
        raise DataError(f"{path} is empty; expected UTF-8 text, one sentence per line")
    return lines


def read_text(path: PathName) -> str:
    """Read a UTF-8 file as one text, line ends included, for language models.

    A byte-order mark at the start and the carriage return of a line end are dropped.

    Raises:
        DataError: For a missing, unreadable or blank file, and (with the line number) for invalid UTF-8.
    """
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise DataError(_cannot_read(path, error)) from error
    _reject_binary_formats(raw, path)
    lines = raw.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").split(b"\n")
    text = "\n".join(_decode(line, path, number) for number, line in enumerate(lines, start=1))
    if not text.strip():
        raise DataError(f"{path} is empty; expected UTF-8 text")
    return text


def read_parallel(
    source_path: PathName, target_path: PathName, *, max_characters: int = MAX_CHARACTERS
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
    source = read_lines(source_path, max_characters=max_characters)
    target = read_lines(target_path, max_characters=max_characters)
    if len(source) != len(target):
        raise DataError(
            f"{source_path} has {len(source)} lines and {target_path} has {len(target)}; "
            "expected the same number: line n of one translates line n of the other"
        )
    corpus = ParallelCorpus(source, target)
    nonblank = [i for i, pair in enumerate(zip(source, target, strict=True)) if all(line.strip() for line in pair)]
    if not nonblank:
        raise DataError(
            f"{source_path} and {target_path} have no line with text on both sides; expected one sentence per line"
        )
    return corpus.select(nonblank)


class FittedPairs(NamedTuple):
    """Encoded pairs within a limit of tokens.

    Attributes:
        rows: Indices of the remaining pairs, from 0.
        source: Source ids.
        target: Target ids.
        num_dropped: Number of pairs left out.
        num_cut: Number of shortened sources.
    """

    rows: list[int]
    source: list[list[int]]
    target: list[list[int]]
    num_dropped: int
    num_cut: int


def fit_lengths(
    source: Sequence[list[int]],
    target: Sequence[list[int]],
    limit: int,
    *,
    truncation: str = "error",
    names: Sequence[PathName] = ("source", "target"),
    line_numbers: Sequence[int] = (),
    cut: Callable[[list[int], int], list[int]] = lambda ids, limit: ids[:limit],
) -> FittedPairs:
    """Restrict encoded pairs to a number of tokens per line.

    Args:
        source: Source ids of each line, without special ids.
        target: Target ids of each line, without special ids.
        limit: Largest number of tokens.
        truncation: "error" raises for longer lines; "drop" omits pairs with a longer line; "cut" keeps the first
            `limit` tokens of a source and raises for longer targets.
        names: Names of the two sides in errors.
        line_numbers: As in `ParallelCorpus`.
        cut: Function (ids, limit) -> ids that shortens a source.

    Raises:
        DataError: For lines that are too long, or if no pair remains.
        ConfigError: For a limit below 1 or another truncation.
    """
    if limit < 1:
        raise ConfigError(f"limit is {limit} tokens per line; expected at least 1")
    if truncation not in TRUNCATION_MODES:
        raise ConfigError(f"truncation is {truncation!r}; expected one of: {', '.join(TRUNCATION_MODES)}")
    if len(source) != len(target):
        raise DataError(f"source has {len(source)} lines and target {len(target)}; expected one target for each source")
    if truncation == "drop":
        rows = [row for row, pair in enumerate(zip(source, target, strict=True)) if max(map(len, pair)) <= limit]
        if source and not rows:
            raise DataError(f"all {len(source)} lines have more than {limit} tokens; raise the limit with --max-length")
        kept = [source[row] for row in rows], [target[row] for row in rows]
        return FittedPairs(rows, *kept, num_dropped=len(source) - len(rows), num_cut=0)
    num_cut = 0
    if truncation == "cut":
        num_cut = sum(len(ids) > limit for ids in source)
        source = [cut(ids, limit) for ids in source]
    for encoded, name in zip((source, target), names, strict=True):
        _check_lengths(encoded, limit, name, line_numbers)
    return FittedPairs(list(range(len(source))), list(source), list(target), 0, num_cut)


def _check_lengths(encoded: Sequence[list[int]], limit: int, name: PathName, line_numbers: Sequence[int]) -> None:
    long = [index for index, ids in enumerate(encoded) if len(ids) > limit]
    if long:
        number = line_numbers[long[0]] if line_numbers else long[0] + 1
        raise DataError(
            f"{name} has {len(long)} line{'s' if len(long) > 1 else ''} of more than {limit} tokens, the first on line "
            f"{number} ({len(encoded[long[0]])} tokens); raise the limit with --max-length, or omit such lines with "
            "--truncation drop"
        )
