"""A large text file as chunks of lines that can be read one by one, on any machine."""

from __future__ import annotations

import codecs
import hashlib
import io
import itertools
import os
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from xformer.errors import DataError
from xformer.text.corpus import PathName, is_empty, iter_lines, open_text

_DIGEST_BYTES = 16


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


class LineChunks:
    """The chunks of a file of UTF-8 text, found in one pass over it with the memory of a chunk.

    Args:
        path: The file.
        chunk_lines: Lines of each chunk; the last one may have fewer.

    Attributes:
        num_lines: Number of lines.

    Raises:
        DataError: For a missing, unreadable or empty file, and (with the line number) for invalid UTF-8.
    """

    def __init__(self, path: PathName, chunk_lines: int) -> None:
        self.path, self.chunk_lines = Path(os.path.abspath(path)), chunk_lines
        self.num_lines = 0
        self._stops, self._digests = array("q", [0]), bytearray()  # of 24 bytes for each chunk
        with open_text(path) as file:
            while lines := list(itertools.islice(file, chunk_lines)):
                data = b"".join(lines)
                try:
                    data.decode()
                except UnicodeDecodeError:  # find the number of the line
                    list(iter_lines(io.BytesIO(data), path, max_characters=len(data), first_number=self.num_lines + 1))
                self.num_lines += len(lines)
                self._stops.append(self.num_bytes + len(data))
                self._digests += _digest(data).digest()
        if self.num_bytes <= len(codecs.BOM_UTF8) and self.path.read_bytes() in (b"", codecs.BOM_UTF8):
            raise is_empty(path)

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._stops[-1]

    def __len__(self) -> int:
        return len(self._stops) - 1

    def __getitem__(self, number: int) -> LineChunk:
        first_index = number * self.chunk_lines
        num_lines = min(self.chunk_lines, self.num_lines - first_index)
        digest = bytes(self._digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES])
        return LineChunk(self.path, first_index, num_lines, self._stops[number], self._stops[number + 1], digest)

    def digest(self) -> str:
        """Return a digest of the content of the file, and of the number of lines of a chunk."""
        return _digest(self._digests).hexdigest()


def _digest(data: bytes | bytearray) -> Any:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES)
