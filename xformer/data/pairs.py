"""Sentence pairs in batches of similar length, filled up to a number of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xformer.backends import Array, Device, Namespace, from_host
from xformer.data.bucketing import fill_batches
from xformer.errors import ConfigError, DataError
from xformer.models.token_ids import pad
from xformer.random import Rng

# How far (in tokens) lengths are blurred before sorting, so that batches differ from epoch to epoch.
_LENGTH_NOISE = 4.0


@dataclass(frozen=True)
class TokenPairs:
    """Encoded sentence pairs, without bos and eos."""

    source: Sequence[Sequence[int]]
    target: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise DataError(
                f"{len(self.source)} source and {len(self.target)} target sentences; expected as many of each"
            )

    def __len__(self) -> int:
        return len(self.source)


class Batch(NamedTuple):
    """Padded ids: source (batch, source length), target (the decoder's input) and labels (batch, target length)."""

    source: Array
    target: Array
    labels: Array
    num_tokens: int  # labels that are not padding

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
    ) -> Batch:
        """Pad the chosen rows: source + eos, bos + target, target + eos."""
        source = [[*pairs.source[row], eos_id] for row in rows]
        target = [[bos_id, *pairs.target[row]] for row in rows]
        labels = [[*pairs.target[row], eos_id] for row in rows]
        columns = (pad(ids, pad_id) for ids in (source, target, labels))
        arrays = [from_host(xp, ids, dtype="int64", device=device) for ids in columns]
        return cls(arrays[0], arrays[1], arrays[2], num_tokens=sum(map(len, labels)))


def plan_batches(pairs: TokenPairs, batch_tokens: int, rng: Rng | None) -> list[list[int]]:
    """Group row numbers into batches whose padded size (rows times longest side) is at most `batch_tokens`.

    rng: blurs the lengths and shuffles the batches; None keeps them sorted (for validation).
    A pair longer than batch_tokens gets a batch of its own.
    """
    if batch_tokens < 1:
        raise ConfigError(f"batch_tokens is {batch_tokens}; expected at least 1")
    lengths = [max(len(s), len(t)) + 1 for s, t in zip(pairs.source, pairs.target, strict=True)]
    totals = [len(s) + len(t) for s, t in zip(pairs.source, pairs.target, strict=True)]
    noise = rng.fold("lengths").uniform((len(pairs),), 0.0, _LENGTH_NOISE).tolist() if rng else [0.0] * len(pairs)
    order = sorted(range(len(pairs)), key=lambda row: (totals[row] + noise[row], row))
    batches = fill_batches(order, lengths, batch_tokens)
    if rng is None:
        return batches
    return [batches[index] for index in rng.fold("order").permutation(len(batches))]


def epochs(pairs: TokenPairs, batch_tokens: int, rng: Rng, skip: int = 0) -> Iterator[tuple[int, list[int]]]:
    """Yield (epoch, rows) without end, every epoch in an order of its own; `skip` batches were seen before.

    The order depends on the Rng and the epoch alone, so a resumed run sees the same batches.

    Raises DataError when there are no pairs.
    """
    if not len(pairs):
        raise DataError("there are no sentence pairs to train on; expected at least one")
    epoch = 0
    while True:
        plan = plan_batches(pairs, batch_tokens, rng.fold("epoch", epoch))
        for rows in plan[skip:]:
            yield epoch, rows
        skip = max(0, skip - len(plan))
        epoch += 1


def split_rows(rows: Sequence[int], parts: int) -> list[list[int]]:
    """Split a batch into at most `parts` shards of neighboring rows; sorted rows keep their padding small."""
    parts = max(1, min(parts, len(rows)))
    bounds = [len(rows) * i // parts for i in range(parts + 1)]
    return [list(rows[start:stop]) for start, stop in itertools.pairwise(bounds)]
