"""The helper threads of compiled kernels; thread_pool_kernels describes the protocol."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import threading
from typing import Any

import numpy as np

from xformer.backends.recording import current_tape
from xformer.kernels.numba.arrays import import_kernels
from xformer.threads import at_fork, available_threads, fork_safe_lock

_MIN_MULTIPLICATIONS = 500_000  # per thread: some ten microseconds
_LOCK = fork_safe_lock()


class _Pool:
    """The state that threads share, and an event, a plain lock, to wake each thread."""

    def __init__(self) -> None:
        self._kernels = import_kernels("thread_pool_kernels")
        self.state: Any = np.zeros(self._kernels.STATE_SIZE, np.int64)
        self._events: list[Any] = []
        self._threads: list[threading.Thread] = []

    def wake(self, num_helpers: int) -> None:
        """Wake helpers, and start those that do not exist yet."""
        if self.state[self._kernels.AWAKE] >= num_helpers:
            return
        with _LOCK:
            with contextlib.suppress(RuntimeError):  # the system has no more threads; use fewer
                while len(self._events) < num_helpers and not self.state[self._kernels.STOPPED]:
                    event = _thread.allocate_lock()
                    thread = threading.Thread(
                        target=self._run_helper, args=(event,), name="xformer-helper", daemon=True
                    )
                    thread.start()
                    self._events.append(event)
                    self._threads.append(thread)
            self._set_events(num_helpers)

    def _run_helper(self, event: Any) -> None:
        last_job = np.zeros(1, np.int64)
        while not self.state[self._kernels.STOPPED]:
            self._kernels.worker_loop(self.state, last_job)
            event.acquire()

    def _set_events(self, count: int) -> None:
        for event in self._events[:count]:
            if event.locked():
                event.release()

    def stop(self) -> None:
        """Join all threads: compiled code must not be unloaded while they run it."""
        self.state[self._kernels.STOPPED] = 1
        with _LOCK:
            self._set_events(len(self._events))
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


def threads_for(num_multiplications: int) -> int:
    """Return the number of threads for a number of multiplications."""
    if num_multiplications < 2 * _MIN_MULTIPLICATIONS:
        return 1
    return min(available_threads(), num_multiplications // _MIN_MULTIPLICATIONS)


def run_parallel(kernel: Any, body: Any, num_parts: int, num_threads: int, *arguments: Any) -> None:
    """Call a kernel that runs `body` on all parts of a job, on at most `num_threads` threads."""
    num_helpers = min(num_threads, num_parts) - 1
    pool = _pools[0] if _pools else _pool()
    if num_helpers > 0:
        pool.wake(num_helpers)
        tape = current_tape()
        if tape is not None:
            tape.append(pool.wake, (num_helpers,))
    kernel(pool.state, num_helpers, num_parts, body.address, arguments)
