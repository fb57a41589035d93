"""The threads that help compiled loops; thread_pool_loops says how."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import threading
from typing import Any

import numpy as np

from xformer.kernels.numpy.support import loops_of
from xformer.threads import at_fork, available_threads, fork_safe_lock

_PART = 500_000  # multiplications that a thread has to do at least, some ten microseconds
_LOCK = fork_safe_lock()


class _Pool:
    """The words that its threads share, and a bell for each, to wake it."""

    def __init__(self) -> None:
        self._loops = loops_of("thread_pool_loops")
        self.words: Any = np.zeros(self._loops.WORDS, np.int64)
        self._bells: list[Any] = []
        self._threads: list[threading.Thread] = []

    def wake(self, helpers: int) -> None:
        """Ring for so many helpers, and make those that there are not yet."""
        if self.words[self._loops.AWAKE] >= helpers:
            return
        with _LOCK:
            with contextlib.suppress(RuntimeError):  # the system has no more threads: there are fewer, then
                while len(self._bells) < helpers and not self.words[self._loops.STOPPED]:
                    bell = _thread.allocate_lock()
                    thread = threading.Thread(target=self._help, args=(bell,), name="xformer-helper", daemon=True)
                    thread.start()
                    self._bells.append(bell)
                    self._threads.append(thread)
            self._ring(helpers)

    def _help(self, bell: Any) -> None:
        done = np.zeros(1, np.int64)
        while not self.words[self._loops.STOPPED]:
            self._loops.help_out(self.words, done)
            bell.acquire()

    def _ring(self, helpers: int) -> None:
        for bell in self._bells[:helpers]:
            if bell.locked():
                bell.release()

    def stop(self) -> None:
        """End all threads: compiled code must not go while they are in it."""
        self.words[self._loops.STOPPED] = 1
        with _LOCK:
            self._ring(len(self._bells))
        for thread in self._threads:
            thread.join()


_pools: list[_Pool] = []


def _pool() -> _Pool:
    with _LOCK:
        if not _pools:
            _pools.append(_Pool())
            atexit.register(_pools[0].stop)
        return _pools[0]


at_fork(after_in_child=_pools.clear)


def threads_for(work: int) -> int:
    """How many threads are worth it for so many multiplications."""
    return 1 if work < 2 * _PART else min(available_threads(), work // _PART)


def share(loop: Any, worker: Any, parts: int, threads: int, *arguments: Any) -> None:
    """Have a worker do all parts of a job, on at most so many threads."""
    helpers = min(threads, parts) - 1
    pool = _pools[0] if _pools else _pool()
    if helpers > 0:
        pool.wake(helpers)
    loop(pool.words, helpers, parts, worker.address, *arguments)
