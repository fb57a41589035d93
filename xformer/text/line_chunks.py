"""A large text file as chunks of lines that can be read one by one, on any machine."""

from __future__ import annotations

import codecs
import hashlib
import io
import os
from array import array
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.errors import DataError
from xformer.text.corpus import PathName, is_empty, iter_lines, open_text

_BLOCK_BYTES = 1 << 20
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
        if hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest() != self.digest:
            raise DataError(
                f"lines {self.first_index + 1} to {self.first_index + self.num_lines} of {self.path} have changed "
                "since the run started; restore the file"
            )
        number = self.first_index + 1
        return list(iter_lines(io.BytesIO(data), self.path, max_characters=len(data), first_number=number))


class LineChunks:
    """The chunks of a file of UTF-8 text, found in one pass over it with little memory.

    Args:
        path: The file.
        chunk_lines: Lines of each chunk; the last one may have fewer.

    Attributes:
        num_lines: Number of lines.
        num_bytes: Size of the file.

    Raises:
        DataError: For a missing, unreadable or empty file, and (with the line number) for invalid UTF-8.
    """

    def __init__(self, path: PathName, chunk_lines: int) -> None:
        self.path, self.chunk_lines = Path(os.path.abspath(path)), chunk_lines
        self.num_lines = self.num_bytes = 0
        self._stops, self._digests = array("q", [0]), bytearray()  # of 24 bytes for each chunk
        decoder, digest = codecs.getincrementaldecoder("utf-8")(), _new_digest()
        with open_text(path) as file:
            try:
                while block := file.read(_BLOCK_BYTES):
                    decoder.decode(block)
                    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + 1
                    start = 0
                    for end in ends[self.chunk_lines - 1 - self.num_lines % self.chunk_lines :: self.chunk_lines]:
                        digest.update(block[start:end])
                        self._end_chunk(self.num_bytes + int(end), digest)
                        start, digest = end, _new_digest()
                    digest.update(block[start:])
                    self.num_lines += len(ends)
                    self.num_bytes += len(block)
                    last = block[-1:]
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                file.seek(0)
                for _ in iter_lines(file, path, max_characters=1 << 40):  # raises the error with the line number
                    pass
                raise
        if self.num_bytes <= len(codecs.BOM_UTF8) and self.path.read_bytes() in (b"", codecs.BOM_UTF8):
            raise is_empty(path)
        if last != b"\n":
            self.num_lines += 1
        if self._stops[-1] < self.num_bytes:
            self._end_chunk(self.num_bytes, digest)

    def _end_chunk(self, stop: int, digest: Any) -> None:
        self._stops.append(stop)
        self._digests += digest.digest()

    def __len__(self) -> int:
        return len(self._stops) - 1

    def __getitem__(self, number: int) -> LineChunk:
        first_index = number * self.chunk_lines
        num_lines = min(self.chunk_lines, self.num_lines - first_index)
        digest = bytes(self._digests[number * _DIGEST_BYTES : (number + 1) * _DIGEST_BYTES])
        return LineChunk(self.path, first_index, num_lines, self._stops[number], self._stops[number + 1], digest)

    def digest(self) -> str:
        """Return a digest of the content of the file, and of the number of lines of a chunk."""
        digest = _new_digest()
        digest.update(self._digests)
        return digest.hexdigest()


def _new_digest() -> Any:
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)
