"""Pieces of one long text, for language models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from xformer.backends import Array, Device, Namespace, from_host
from xformer.errors import ConfigError, DataError
from xformer.random import Rng


class TextChunks(NamedTuple):
    """Tokens (batch, length), and as labels the tokens that follow each of them (batch, length)."""

    tokens: Array
    labels: Array
    num_tokens: int  # labels

    @classmethod
    def make(
        cls, text: Sequence[int], starts: Sequence[int], length: int, *, xp: Namespace, device: Device = None
    ) -> TextChunks:
        """Cut windows of `length` tokens, beginning at these places, out of a text: a list or NumPy array of ids."""
        tokens, labels = (
            from_host(
                xp, [text[start + shift : start + shift + length] for start in starts], dtype="int64", device=device
            )
            for shift in (0, 1)
        )
        return cls(tokens, labels, num_tokens=len(starts) * length)


def check_text(text: Sequence[int], length: int, batch_size: int, name: str) -> None:
    """Raise DataError for a text without one whole window, ConfigError for windows or batches of nothing."""
    for setting, value in (("context_length", length), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{setting} is {value}; expected at least 1")
    if len(text) <= length:
        raise DataError(
            f"the {name} text has {len(text)} tokens; expected at least {length + 1}, one more than a "
            "window; take more text or a shorter context"
        )


def random_starts(text: Sequence[int], length: int, batch_size: int, rng: Rng, skip: int = 0) -> Iterator[list[int]]:
    """Yield where the windows of each batch begin, without end: anywhere in the text, every place as likely.

    A batch depends on the Rng and its own number alone; `skip` batches were seen before.
    """
    number = skip
    while True:
        yield rng.fold("windows", number).generator().integers(0, len(text) - length, batch_size).tolist()
        number += 1


def all_windows(text: Sequence[int], length: int, batch_size: int) -> list[tuple[list[int], int]]:
    """Cut a text into windows one after the other, in batches: (where they begin, their length).

    Each token but the first is a label once; what is left at the end is one shorter window.
    """
    whole, rest = divmod(len(text) - 1, length)
    starts = [number * length for number in range(whole)]
    batches = [(starts[first : first + batch_size], length) for first in range(0, whole, batch_size)]
    return [*batches, ([whole * length], rest)] if rest else batches
