"""Chunks of one long text, for language models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from xformer.backends import Array, Device, Namespace, from_host
from xformer.config import check_count
from xformer.data.pairs import split_rows
from xformer.errors import DataError
from xformer.random import Rng


class TextChunks(NamedTuple):
    """Chunks of a text.

    Attributes:
        tokens: (batch, length).
        labels: (batch, length), the token that follows each token.
    """

    tokens: Array
    labels: Array

    @property
    def num_tokens(self) -> int:
        """Number of labels."""
        return int(self.labels.shape[0] * self.labels.shape[1])

    def split(self, count: int) -> list[Self]:
        """Return at most `count` batches of neighboring chunks."""
        groups = split_rows(range(self.tokens.shape[0]), count)
        slices = [slice(rows[0], rows[-1] + 1) for rows in groups]
        return [self._replace(tokens=self.tokens[rows], labels=self.labels[rows]) for rows in slices]

    @classmethod
    def make(
        cls, text: Sequence[int], starts: Sequence[int], length: int, *, xp: Namespace, device: Device = None
    ) -> Self:
        """Cut chunks of `length` tokens out of a text, a list or NumPy array of token ids, as arrays of a namespace."""
        tokens, labels = (
            from_host(
                xp, [text[start + shift : start + shift + length] for start in starts], dtype="int64", device=device
            )
            for shift in (0, 1)
        )
        return cls(tokens, labels)


def check_text(text: Sequence[int], length: int, batch_size: int, name: str) -> None:
    """Raise DataError for a text shorter than a chunk, ConfigError for empty chunks or batches."""
    check_count("context_length", length)
    check_count("batch_size", batch_size)
    if len(text) <= length:
        raise DataError(
            f"the {name} text has {len(text)} tokens; expected at least {length + 1}, one more than a "
            "chunk; use a longer text or a smaller context_length"
        )


def random_starts(text: Sequence[int], length: int, batch_size: int, rng: Rng, skip: int = 0) -> Iterator[list[int]]:
    """Yield the first indices of the chunks of each batch without end, uniformly distributed over the text.

    A batch depends only on the Rng and its own number; the first `skip` ones are left out.
    """
    number = skip
    while True:
        yield rng.fold_in("chunks", number).generator().integers(0, len(text) - length, batch_size).tolist()
        number += 1


def consecutive_chunks(text: Sequence[int], length: int, batch_size: int) -> list[tuple[list[int], int]]:
    """Return batches (first indices, length) of consecutive chunks, in which every token but the first is a label once.

    The end of the text may be one shorter chunk.
    """
    count, remainder = divmod(len(text) - 1, length)
    starts = [number * length for number in range(count)]
    batches = [(starts[first : first + batch_size], length) for first in range(0, count, batch_size)]
    return [*batches, ([count * length], remainder)] if remainder else batches
