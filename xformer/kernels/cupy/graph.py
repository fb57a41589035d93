"""CUDA graphs: the kernels of a piece of work, recorded once and launched together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import cupy

_WARM_UP = 2  # times the work is done before it is recorded: kernels are compiled, plans made, libraries get workspace


def record(work: Callable[[], Any]) -> Callable[[], None]:
    """Make of work, which reads and writes arrays that stay where they are, one that does the same again.

    The first calls do it as it is; the next one records it. What it allocates comes from a pool of its own, which
    nothing else gets memory from as long as the recording is there. What cannot be recorded is done as it is, after a
    warning that says why.
    """
    return _Recording(work)


class _Recording:
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._calls = work, 0
        self._pool = cupy.cuda.MemoryPool()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._graph: Any = None

    def __call__(self) -> None:
        outside = cupy.cuda.get_current_stream()
        self._stream.wait_event(outside.record())
        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            if self._calls == _WARM_UP:
                self._record()
            if self._graph is None:
                self._work()
            else:
                self._graph.launch(self._stream)
        self._calls += 1
        outside.wait_event(self._stream.record())

    def _record(self) -> None:
        self._stream.begin_capture()  # in relaxed mode, which lets the pool grow
        reason: Exception | None = None
        try:
            self._work()
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:  # CUDA's own are RuntimeErrors
            reason = error
        try:
            self._graph = self._stream.end_capture()
        except RuntimeError as error:
            reason = reason or error
        if reason is not None:
            self._graph = None
            warnings.warn(f"a step could not be recorded as a CUDA graph, and runs as it is: {reason}", stacklevel=2)
