"""Batches for language models: chunks of one long text, and packed documents, several of them in each row."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from xformer.backends import Array, Device, Namespace, from_host
from xformer.config import check_count, integers
from xformer.data.pairs import split_rows
from xformer.data.token_rows import row_lengths
from xformer.errors import DataError

IGNORE_INDEX = -100  # the label of tokens without a loss, torch's ignore_index


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
        return [type(self)(self.tokens[rows], self.labels[rows]) for rows in split_rows(self.tokens.shape[0], count)]

    @classmethod
    def make(
        cls, text: Sequence[int], starts: Sequence[int], length: int, *, xp: Namespace, device: Device = None
    ) -> Self:
        """Cut chunks of `length` tokens out of a text, a list or NumPy array of token ids, as arrays of a namespace."""
        columns = starts, [start + 1 for start in starts]
        rows = ([text[start : start + length] for start in column] for column in columns)
        return cls(*(from_host(xp, each, dtype="int64", device=device) for each in rows))


@dataclass(frozen=True)
class Documents:
    """Token ids of documents, for language models.

    Attributes:
        tokens: Token ids of each document.
        loss_masks: For each token of each document 1, or 0 for a token that the model reads but does not learn to
            predict, such as those of a prompt. Default: 1 for all. The first token of a document is never predicted.

    Raises:
        DataError: If documents are not lists, or their numbers or those of their tokens differ.
    """

    tokens: Sequence[Sequence[int]]
    loss_masks: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        try:
            counts = [row_lengths(rows).tolist() for rows in (self.tokens, self.loss_masks) if rows is not None]
        except TypeError as error:
            raise DataError(f"documents are not lists of lists ({error}); expected the token ids of each") from error
        if counts[0] != counts[-1]:
            raise DataError("tokens and loss_masks have rows of other lengths; expected one number for each token")

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def lengths(self) -> Any:
        """Number of input tokens of each document, a NumPy array: its length minus 1.

        The last token is only a label.
        """
        return np.maximum(row_lengths(self.tokens) - 1, 0)


class PackedBatch(NamedTuple):
    """Rows of one or more documents each.

    Attributes:
        tokens: (batch, length), one document after the other, then padding.
        labels: (batch, length), the token that follows each token in its document; -100 if it has no loss.
        segment_ids: (batch, length), the index of the document in its row, from 1; 0 for padding.
        counts: Number of labels of each row that have a loss, (batch,), a NumPy array.
        positions: The columns of these labels, (batch, n), filled up with columns of others; None for all. The loss
            computes the logits of these columns only.
    """

    tokens: Array
    labels: Array
    segment_ids: Array
    counts: Any
    positions: Array | None = None

    @property
    def num_tokens(self) -> int:
        """Number of labels that have a loss."""
        return int(self.counts.sum())

    def split(self, count: int) -> list[Self]:
        """Return at most `count` batches of neighboring rows."""
        parts, arrays = split_rows(len(self.counts), count), [array for array in self if array is not None]
        return [type(self)(*(array[rows] for array in arrays)) for rows in parts]

    @classmethod
    def make(
        cls,
        documents: Documents,
        rows: Sequence[Sequence[int]] | None = None,
        length: int | None = None,
        *,
        xp: Namespace,
        device: Device = None,
    ) -> Self:
        """Make a batch.

        Args:
            documents: The documents.
            rows: The indices of the documents of each row, e.g. of `pack_documents`. Default: one document each.
            length: Length of the rows; default that of the longest.
            xp: Namespace of the arrays.
            device: Device of the arrays.

        Raises:
            DataError: If no document has two tokens, a row does not fit, or indices, tokens or masks are not valid.
        """
        rows = [[index] for index in range(len(documents))] if rows is None else rows
        rows = [integers(f"row {index}", row) for index, row in enumerate(rows)]
        for document in itertools.chain.from_iterable(rows):
            if not 0 <= document < len(documents):
                raise DataError(f"rows has the document {document}; expected indices from 0 to {len(documents) - 1}")
        longest = max((int(documents.lengths[row].sum()) for row in rows if row), default=0)
        length = longest if length is None else length
        if longest == 0:
            raise DataError("no document has two tokens; expected at least one")
        if longest > length:
            raise DataError(f"the longest of {len(rows)} rows has {longest} tokens; expected at most {length}")
        tokens, segment_ids = (np.zeros((len(rows), length), np.int64) for _ in range(2))
        labels = np.full((len(rows), length), IGNORE_INDEX, np.int64)
        for index, row in enumerate(rows):
            end = 0
            for segment, document in enumerate(row, start=1):
                ids = np.asarray(integers("tokens", documents.tokens[document]), np.int64)
                start, end = end, end + len(ids[1:])
                tokens[index, start:end], labels[index, start:end] = ids[:-1], ids[1:]
                segment_ids[index, start:end] = segment
                if documents.loss_masks is not None:
                    mask = documents.loss_masks[document]
                    if others := [value for value in mask if value not in (0, 1)]:
                        raise DataError(f"loss_masks has {others[0]!r} in document {document}; expected 0 or 1")
                    labels[index, start:end][np.asarray(mask[1:]) == 0] = IGNORE_INDEX
        has_loss = labels != IGNORE_INDEX
        counts, step = has_loss.sum(axis=1), max(16, length // 8)  # few sizes, as each of them is compiled
        width = min(length, math.ceil(counts.max() / step) * step)
        positions = np.argsort(~has_loss, axis=1, kind="stable")[:, :width]
        hosts = (tokens, labels, segment_ids, positions)
        arrays = [from_host(xp, host, dtype="int64", device=device) for host in hosts]
        return cls(arrays[0], arrays[1], arrays[2], counts, arrays[3])


def pack_documents(lengths: Iterable[int], length: int) -> list[list[int]]:
    """Distribute documents over as few rows as best-fit decreasing finds, longest documents first.

    Args:
        lengths: Tokens that each document takes, e.g. `Documents.lengths`; documents without any are left out.
        length: Tokens of a row.

    Returns:
        The indices of the documents of each row.

    Raises:
        DataError: If a document is longer than a row, or a length is not an integer.
    """
    check_count("length", length)
    sizes = integers("lengths", lengths)
    rows: list[list[int]] = []
    spaces: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        if size > length:
            raise DataError(f"document {index} takes {size} tokens; expected at most {length}, the length of a row")
        if size:
            place = bisect.bisect_left(spaces, (size, 0))
            left, row = spaces.pop(place) if place < len(spaces) else (length, len(rows))
            if row == len(rows):
                rows.append([])
            rows[row].append(index)
            bisect.insort(spaces, (left - size, row))
    return rows
