"""CUDA graphs: the kernels that a function launches, captured once and replayed together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import cupy

_NUM_WARM_UP = 2  # calls before the capture, which compile kernels, build plans and allocate workspaces


def capture_graph(function: Callable[[], Any]) -> Callable[[], None]:
    """Capture a function as a CUDA graph.

    The first calls run the function; the next one captures it, and later ones replay the graph. Its memory comes from
    a pool of its own. If the function cannot be captured, a warning gives the reason, and every call runs it as usual.

    Args:
        function: A function without arguments, which reads and writes the same arrays in every call.

    Returns:
        A function that does the same.
    """
    return _Graph(function)


class _Graph:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._calls = function, 0
        self._pool = cupy.cuda.MemoryPool()
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._graph: Any = None

    def __call__(self) -> None:
        caller_stream = cupy.cuda.get_current_stream()
        self._stream.wait_event(caller_stream.record())
        with self._stream, cupy.cuda.using_allocator(self._pool.malloc):
            if self._calls == _NUM_WARM_UP:
                self._capture()
            if self._graph is None:
                self._function()
            else:
                self._graph.launch(self._stream)
        self._calls += 1
        caller_stream.wait_event(self._stream.record())

    def _capture(self) -> None:
        self._stream.begin_capture()  # in relaxed mode, which lets the pool grow
        reason: Exception | None = None
        try:
            self._function()
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:  # errors of CUDA are RuntimeErrors
            reason = error
        try:
            self._graph = self._stream.end_capture()
        except RuntimeError as error:
            reason = reason or error
        if reason is not None:
            self._graph = None
            warnings.warn(f"a step cannot be captured as a CUDA graph and runs without one: {reason}", stacklevel=2)
