"""Batches of examples of similar length, filled up to a number of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def fill_batches(rows: Iterable[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Group rows, in the given order, into batches of at most `batch_tokens` tokens, padding included.

    Args:
        rows: Row numbers; sort them by length to keep the padding small.
        lengths: Tokens of each row.
        batch_tokens: Limit of the rows of a batch times its longest one. A longer row gets a batch of its own.
    """
    batches: list[list[int]] = []
    longest = 0
    for row in rows:
        longest = max(longest, lengths[row])
        if batches and longest * (len(batches[-1]) + 1) <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = lengths[row]
    return batches


def bucket_size(size: int, multiple: int = 1) -> int:
    """Round a size up to a multiple of a power of two with four significant bits, which adds less than an eighth."""
    step = max(multiple, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
