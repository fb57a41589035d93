"""Sums of gradients over shards and ranks during the backward pass."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from xformer.backends import Array
from xformer.distributed.communicator import Communicator, buckets, tree_sum

_BUCKET_BYTES = 2**22  # smaller than in `all_reduce`, so that the first one is complete early


class OverlappedSum:
    """Adds gradients in a thread while others are computed, bucket by bucket (Li et al., 2020, section 3.2).

    All ranks add the buckets in the same order, from the last parameters to the first: the order of the backward pass.

    Args:
        communicator: The ranks.
        parameters: The parameters, whose shapes and dtypes the gradients have.
        num_shards: Number of shards of this rank.
    """

    def __init__(self, communicator: Communicator, parameters: Sequence[Array], num_shards: int) -> None:
        self._communicator, count = communicator, len(parameters)
        self._gradients: list[list[Any]] = [[None] * num_shards for _ in range(count)]
        self._num_missing = [num_shards] * count
        last_to_first = list(reversed(range(count)))
        ordered = buckets([parameters[number] for number in last_to_first], _BUCKET_BYTES)
        self._buckets = [[last_to_first[index] for index in bucket] for bucket in ordered]
        self._condition, self._is_canceled = threading.Condition(), False
        self.totals: list[Any] = [None] * count

    def add(self, shard: int, number: int, gradient: Array) -> None:
        """Add the gradient of a parameter in one shard."""
        with self._condition:
            self._gradients[number][shard] = gradient
            self._num_missing[number] -= 1
            self._condition.notify()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Add the buckets that become complete in the block, and wait for the others; `totals` are then the sums."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self._run)
            try:
                yield
            except BaseException:
                with self._condition:
                    self._is_canceled = True
                    self._condition.notify()
                raise
            future.result()

    def _run(self) -> None:
        for bucket in self._buckets:
            with self._condition:
                while not self._is_canceled and any(self._num_missing[number] for number in bucket):
                    self._condition.wait()
                if self._is_canceled:
                    return
            sums = [tree_sum(self._gradients[number]) for number in bucket]
            for number, total in zip(bucket, self._communicator.all_reduce(sums), strict=True):
                self.totals[number], self._gradients[number] = total, []
