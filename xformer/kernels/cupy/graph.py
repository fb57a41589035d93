"""CUDA graphs: the kernels that a function launches, captured once and replayed together."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import cupy

from xformer.kernels.cupy.cublas import captured_workspace

_NUM_WARM_UP = 2  # calls before the capture, which compile kernels, build plans and allocate workspaces
_CUBLAS_WORKSPACE = 32 << 20  # bytes, as cuBLAS uses on Hopper


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


class _Resources(NamedTuple):
    """A memory pool, the stream that orders the use of its memory, and a workspace for cuBLAS."""

    pool: Any
    stream: Any
    workspace: Any


# Resources of former graphs, by device. CuPy would never free the memory of a pool that is dropped.
_idle: dict[int, list[_Resources]] = {}


def _new_resources() -> _Resources:
    pool = cupy.cuda.MemoryPool()
    return _Resources(pool, cupy.cuda.Stream(non_blocking=True), pool.malloc(_CUBLAS_WORKSPACE))


class _Graph:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._function, self._calls = function, 0
        idle = _idle.setdefault(cupy.cuda.runtime.getDevice(), [])
        self._resources = idle.pop() if idle else _new_resources()
        weakref.finalize(self, idle.append, self._resources).atexit = False
        self._graph: Any = None

    @property
    def nbytes(self) -> int:
        """Size of its memory, without the workspace."""
        return int(self._resources.pool.total_bytes()) - _CUBLAS_WORKSPACE

    def __call__(self) -> None:
        (pool, stream, workspace), caller_stream = self._resources, cupy.cuda.get_current_stream()
        stream.wait_event(caller_stream.record())
        with stream, cupy.cuda.using_allocator(pool.malloc), captured_workspace(workspace.ptr, _CUBLAS_WORKSPACE):
            if self._calls == _NUM_WARM_UP:
                self._capture(stream)
            if self._graph is None:
                self._function()
            else:
                self._graph.launch(stream)
        self._calls += 1
        caller_stream.wait_event(stream.record())

    def _capture(self, stream: Any) -> None:
        stream.begin_capture()  # in relaxed mode, which lets the pool grow
        reason: Exception | None = None
        try:
            self._function()
        except (RuntimeError, TypeError, ValueError, MemoryError) as error:  # errors of CUDA are RuntimeErrors
            reason = error
        try:
            self._graph = stream.end_capture()
        except RuntimeError as error:
            reason = reason or error
        if reason is not None:
            self._graph = None
            warnings.warn(f"a step cannot be captured as a CUDA graph and runs without one: {reason}", stacklevel=2)
