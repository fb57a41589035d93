"""Ranks that are threads of one process, for tests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from xformer.distributed import Communicator


class ThreadRank(Communicator):
    """A rank that is a thread: the ranks share a list and wait for each other."""

    def __init__(self, rank, size, slots, barrier):
        self.rank, self.size, self._slots, self._barrier = rank, size, slots, barrier

    def _exchange(self, value):
        self._slots[self.rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def _all_to_all(self, rows):
        return np.stack([np.array(other[self.rank]) for other in self._exchange(rows)])

    def _all_gather(self, row):
        return np.stack(self._exchange(row))

    def _broadcast(self, array, root):
        return np.array(self._exchange(array)[root])

    def abort(self):
        self._barrier.abort()


def run_ranks(size, function):
    """Return the results of function(communicator) on each rank."""
    slots, barrier = [None] * size, threading.Barrier(size, timeout=60)

    def run(rank):
        try:
            return function(ThreadRank(rank, size, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):  # which the other ranks raise then
            raise error
    return [future.result() for future in futures]
