"""Sentence pairs, in batches of similar length with a limited number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from xformer.backends import Array, Device, Namespace, array_namespace, from_host
from xformer.config import check_count
from xformer.data.token_rows import batch_starts, bucket_size, row_lengths
from xformer.errors import DataError
from xformer.models.token_ids import pad
from xformer.random import Rng

# Range (in tokens) of the noise added to lengths before sorting, so that batches differ from epoch to epoch.
_LENGTH_NOISE = 4.0
_BLOCK = 1 << 16


@dataclass(frozen=True)
class TokenPairs:
    """Token ids of sentence pairs, without bos and eos.

    Attributes:
        source: Token ids of each source sentence.
        target: Token ids of each target sentence.
        source_has_eos: Sources include their special tokens, as those of public tokenizers do.

    Raises:
        DataError: If the numbers of sentences differ.
    """

    source: Sequence[Sequence[int]]
    target: Sequence[Sequence[int]]
    source_has_eos: bool = False

    def __post_init__(self) -> None:
        if (source := len(self.source)) != (target := len(self.target)):
            raise DataError(f"{source} source and {target} target sentences; expected equal numbers")

    def __len__(self) -> int:
        return len(self.source)


class Batch(NamedTuple):
    """Padded token ids of sentence pairs.

    Attributes:
        source: (batch, source length), with eos.
        target: (batch, target length), the decoder's input, with bos.
        labels: (batch, target length), with eos.
        lengths: Lengths of the source and the target of each pair, without padding, (batch, 2), a NumPy array; those of
            rows of padding are 0.
    """

    source: Array
    target: Array
    labels: Array
    lengths: Any

    @property
    def num_tokens(self) -> int:
        """Number of labels that are not padding."""
        return int(np.sum(self.lengths[:, 1]))

    def split(self, count: int) -> list[Self]:
        """Return at most `count` batches of neighboring pairs, each padded to its own longest pair."""
        copy, parts = array_namespace(self.source).asarray, []  # kernels need contiguous arrays
        for rows in split_rows(int(np.count_nonzero(self.lengths[:, 1])), count):
            source, target = map(slice, self.lengths[rows].max(axis=0).tolist())
            columns = self.source[rows, source], self.target[rows, target], self.labels[rows, target]
            parts.append(type(self)(*(copy(x, copy=True) for x in columns), self.lengths[rows]))  # type: ignore[call-arg]
        return parts

    @classmethod
    def make(
        cls,
        pairs: TokenPairs,
        rows: Sequence[int],
        *,
        xp: Namespace,
        device: Device = None,
        pad_id: int = 0,
        bos_id: int = 1,
        eos_id: int = 2,
        bucketed: bool = False,
        max_positions: int | None = None,
    ) -> Self:
        """Make a batch.

        Args:
            pairs: The pairs.
            rows: Row numbers of the pairs in the batch.
            xp: Namespace of the arrays.
            device: Device of the arrays.
            pad_id: Token of the padding.
            bos_id: First token of the target.
            eos_id: Last token of the labels, and of sources without special tokens.
            bucketed: Whether to add padding, rows included, so that batches have few different shapes.
            max_positions: Largest length to which `bucketed` pads.
        """
        suffix = [] if pairs.source_has_eos else [eos_id]
        source = [[*pairs.source[row], *suffix] for row in rows]
        target = [[bos_id, *pairs.target[row]] for row in rows]
        labels = [[*pairs.target[row], eos_id] for row in rows]
        lengths = np.asarray([(len(ids), len(out)) for ids, out in zip(source, labels, strict=True)])
        columns = [pad(ids, pad_id) for ids in (source, target, labels)]
        if bucketed:
            columns = [_bucketed(ids, pad_id, max_positions) for ids in columns]
        lengths.resize((len(columns[0]), 2), refcheck=False)
        arrays = [from_host(xp, ids, dtype="int64", device=device) for ids in columns]
        return cls(arrays[0], arrays[1], arrays[2], lengths)


def _bucketed(rows: list[list[int]], pad_id: int, max_positions: int | None) -> list[list[int]]:
    """Pad rows of equal length, and add rows of padding."""
    length = bucket_size(len(rows[0]), 8)
    if max_positions is not None:
        length = max(len(rows[0]), min(length, max_positions))
    padded = [[*row, *[pad_id] * (length - len(row))] for row in rows]
    return padded + [[pad_id] * length] * (bucket_size(len(rows)) - len(rows))


def plan_batches(pairs: TokenPairs, batch_tokens: int, rng: Rng | None) -> list[list[int]]:
    """Return the row numbers of batches of similar length.

    Args:
        pairs: The pairs.
        batch_tokens: Largest padded size of a batch: rows times the longest side. A longer pair gets its own batch.
        rng: Source of the noise on lengths and of the order of batches; None keeps them sorted, for validation.
    """
    order, bounds = _plan(pairs, batch_tokens, rng)
    return [order[start:stop].tolist() for start, stop in bounds]


def _plan(pairs: TokenPairs, batch_tokens: int, rng: Rng | None) -> tuple[Any, list[tuple[int, int]]]:
    """Return the row numbers sorted by length, and where each batch starts and stops in them."""
    check_count("batch_tokens", batch_tokens)
    source, target = row_lengths(pairs.source), row_lengths(pairs.target)
    keys = (source + target).astype(np.float64)
    if rng is not None:
        keys += rng.fold_in("lengths").uniform((len(pairs),), 0.0, _LENGTH_NOISE)
    order = np.argsort(keys, kind="stable")
    lengths = np.maximum(source, target)[order] + 1
    del source, target, keys  # millions of numbers
    # In blocks, since a list takes several times the memory of an array.
    blocks = (lengths[start : start + _BLOCK].tolist() for start in range(0, len(lengths), _BLOCK))
    starts = batch_starts(itertools.chain.from_iterable(blocks), batch_tokens)
    bounds = list(itertools.pairwise([*starts, len(order)]))
    if rng is not None:
        bounds = [bounds[index] for index in rng.fold_in("order").permutation(len(bounds))]
    return order, bounds


def epochs(pairs: TokenPairs, batch_tokens: int, rng: Rng, skip: int = 0) -> Iterator[tuple[int, list[int]]]:
    """Yield (epoch, row numbers of a batch) without end, in another order in every epoch.

    The order depends only on the Rng and the epoch, so a resumed run, which skips batches, sees the same ones.
    Arguments are those of `plan_batches`. Raises DataError if there are no pairs.
    """
    if not len(pairs):
        raise DataError("there are no sentence pairs to train on; expected at least one")
    for epoch in itertools.count():
        order, bounds = _plan(pairs, batch_tokens, rng.fold_in("epoch", epoch))
        for start, stop in bounds[skip:]:
            yield epoch, order[start:stop].tolist()
        skip = max(0, skip - len(bounds))


def split_rows(num_rows: int, count: int) -> list[slice]:
    """Return at most `count` slices of neighboring rows; sorted rows keep their padding small."""
    count = max(1, min(count, num_rows))
    bounds = [num_rows * index // count for index in range(count + 1)]
    return list(itertools.starmap(slice, itertools.pairwise(bounds)))
