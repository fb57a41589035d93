"""Rows of token ids: in batches, and in files mapped into memory, since a corpus may be larger than the memory."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, overload

import numpy as np


class TokenRows(Sequence[list[int]]):
    """Lists of token ids, read from one array when they are used.

    Attributes:
        ids: The ids of all rows, one after the other.
        offsets: Index of the first id of each row, and the number of ids.
    """

    def __init__(self, ids: Any, offsets: Any) -> None:
        self.ids, self.offsets = ids, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, row: int) -> list[int]: ...
    @overload
    def __getitem__(self, row: slice) -> list[list[int]]: ...
    def __getitem__(self, row: int | slice) -> list[int] | list[list[int]]:
        if isinstance(row, slice):
            return [self[index] for index in range(*row.indices(len(self)))]
        index = range(len(self))[row]  # raises IndexError, which ends an iteration
        return self.ids[self.offsets[index] : self.offsets[index + 1]].tolist()


class TokenWriter:
    """Write lists of token ids to files without a name, which the system removes as soon as they are not used.

    On Windows, the files have names that begin with a dot.

    Args:
        vocab_size: Number of different ids: up to 65,536, an id takes 2 bytes, else 4. A list takes 8 more.
        directory: Directory with enough space for the files.
    """

    def __init__(self, vocab_size: int, directory: Path) -> None:
        self._dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
        files = (tempfile.TemporaryFile(prefix=".", dir=directory) for _ in range(2))  # noqa: SIM115
        self._ids, self._offsets = files
        self._offsets.write(bytes(8))
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ids.close()
        self._offsets.close()

    def write(self, rows: Iterable[Sequence[int]]) -> None:
        """Append rows."""
        rows = list(rows)
        ends = np.cumsum([self._count, *map(len, rows)], dtype=np.int64)
        ids = np.fromiter(itertools.chain.from_iterable(rows), self._dtype, int(ends[-1]) - self._count)
        self._ids.write(ids.tobytes())
        self._offsets.write(ends[1:].tobytes())
        self._count = int(ends[-1])

    def finish(self) -> TokenRows:
        """Return all rows, mapped into memory."""
        return TokenRows(_map(self._ids, self._dtype), _map(self._offsets, np.int64))


def row_lengths(rows: Sequence[Sequence[int]]) -> Any:
    """Return the number of ids of each row as a NumPy array."""
    if isinstance(rows, TokenRows):
        return np.diff(rows.offsets)
    return np.fromiter(map(len, rows), np.int64, len(rows))


def _map(file: Any, dtype: Any) -> Any:
    file.flush()
    size = file.seek(0, 2)
    return np.asarray(np.memmap(file, dtype, "r")) if size else np.empty(0, dtype)


def fill_batches(rows: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group rows, in the given order, into batches of at most `batch_tokens` tokens, padding included.

    Args:
        rows: Row numbers; sort them by length to keep the padding small.
        lengths: Tokens of each row.
        batch_tokens: Limit of the rows of a batch times its longest one. A longer row gets its own batch.
    """
    rows = list(rows)
    starts = batch_starts((lengths[row] for row in rows), batch_tokens)
    return [rows[start:stop] for start, stop in itertools.pairwise([*starts, len(rows)])]


def batch_starts(lengths: Iterable[int], batch_tokens: int) -> list[int]:
    """Return the index of the first row of each batch; `lengths` are those of the rows in their order."""
    starts: list[int] = []
    longest = 0
    for index, length in enumerate(lengths):
        longest = max(longest, length)
        if not starts or longest * (index - starts[-1] + 1) > batch_tokens:
            starts.append(index)
            longest = length
    return starts


def bucket_size(size: int, multiple: int = 1) -> int:
    """Round a size up to a multiple of a power of two with four significant bits, which adds less than an eighth."""
    step = max(multiple, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
