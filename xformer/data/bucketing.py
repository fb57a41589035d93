"""Batches of examples of similar length, filled up to a number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence


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
