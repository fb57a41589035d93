"""CUDA graphs: the kernels that a function launches, captured once and replayed together."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import cupy

from xformer.kernels.cupy.cublas import WORKSPACE
from xformer.kernels.cupy.launch import one_line
from xformer.threads import setting

_NUM_WARM_UP = 2  # calls before the capture, which compile kernels, build plans and allocate memory
_CUBLAS_WORKSPACE = 32 << 20  # bytes, as cuBLAS uses on Hopper


class _Arena:
    """The stream of a thread's graphs on a device, and their memory.

    A graph uses its memory only while it runs, and the stream runs one after the other, so all of them share it: it is
    as large as the largest graph needs.

    Attributes:
        users: A key for each graph.
        number: The number of times that the memory was freed; graphs from before are captured again.
    """

    def __init__(self, device: int) -> None:
        self._device, self._pool = device, cupy.cuda.MemoryPool(_new_block)
        self._workspace: Any = None
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self.lock = threading.RLock()  # a program may be run by another thread than that which made it
        self.users: set[object] = set()
        self.number = 0

    def open(self) -> None:
        """Prepare for the first call of a graph, which allocates its memory."""
        # What the calls before have left in CuPy's pool would be allocated twice.
        cupy.get_default_memory_pool().free_all_blocks()
        if self._workspace is None:
            with self.stream:
                self._workspace = self._pool.malloc(_CUBLAS_WORKSPACE)

    def free(self) -> None:
        """Give the memory back to the device."""
        self._workspace, self.number = None, self.number + 1
        with cupy.cuda.Device(self._device):
            self._pool.free_all_blocks()

    def leave(self, user: object) -> None:
        """Free the memory if that was the last graph."""
        self.users.discard(user)
        if not self.users:
            self.free()

    def _malloc(self, size: int) -> Any:
        """Allocate with at most 1/16 of padding, so that graphs of similar shapes use the same blocks."""
        step = 1 << max(0, size.bit_length() - 5)
        return self._pool.malloc(-(-size // step) * step)

    def begin(self, caller: Any) -> None:
        """Let the stream wait for what the stream of the caller has been told to do."""
        caller.record(self._events[0])
        self.stream.wait_event(self._events[0])

    def end(self, caller: Any) -> None:
        """Let the stream of the caller wait for this one."""
        self.stream.record(self._events[1])
        caller.wait_event(self._events[1])

    def call(self, function: Callable[[Any], Any]) -> None:
        """Call a function with the stream and the memory."""
        workspace = self._workspace.ptr, _CUBLAS_WORKSPACE
        with self.stream, cupy.cuda.using_allocator(self._malloc), setting(WORKSPACE, workspace):
            function(_copy)


def _new_block(size: int) -> Any:
    try:
        return cupy.cuda.MemoryPointer(cupy.cuda.Memory(size), 0)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if "MemoryAllocation" not in str(error):
            raise
        # At an error of CUDA, the pool would free the blocks that other graphs use.
        raise cupy.cuda.memory.OutOfMemoryError(size, 0) from error


_arenas = threading.local()


def _copy(array: Any) -> Any:
    """Copy an array to memory outside the pool of the graphs."""
    with cupy.cuda.using_allocator(cupy.get_default_memory_pool().malloc):
        return array.copy(order="K")


class CapturedGraph:
    """A function captured as a CUDA graph.

    The first calls run the function; the next one captures it, and later ones replay the graph. If the function cannot
    be captured, a warning gives the reason, and every call runs it as usual.

    Args:
        function: A function that reads and writes the same arrays in every call. It gets a function that copies an
            array: other arrays that it makes are overwritten by the next graph.
    """

    def __init__(self, function: Callable[[Callable[[Any], Any]], Any]) -> None:
        device, user = cupy.cuda.runtime.getDevice(), object()
        self._function, self._key = function, f"{device}"
        self._arena = vars(_arenas).get(self._key) or vars(_arenas).setdefault(self._key, _Arena(device))
        self._arena.users.add(user)
        self._leave = weakref.finalize(self, self._arena.leave, user)
        self._leave.atexit = False
        self._num_calls, self._graph, self._number, self._is_refused = 0, None, -1, False

    def __call__(self) -> None:
        """Call the function, or launch its graph."""
        caller, arena = cupy.cuda.get_current_stream(), self._arena
        is_part = caller.ptr == arena.stream.ptr  # of another graph
        if not is_part and not self._is_refused:
            with arena.lock:
                self._run(arena, caller)
        if is_part or self._is_refused:
            self._function(_copy)

    def _run(self, arena: _Arena, caller: Any) -> None:
        """Launch the graph, or capture it, or call the function."""
        if self._number != arena.number:
            arena.open()
            self._num_calls, self._graph, self._number = 0, None, arena.number
        arena.begin(caller)
        try:
            if self._num_calls == _NUM_WARM_UP:
                self._capture(arena)
            if self._graph is not None:
                self._graph.launch(arena.stream)
            elif not self._is_refused:
                arena.call(self._function)
        except MemoryError:
            arena.free()  # for smaller graphs, and for what is no graph
            raise
        arena.end(caller)
        self._num_calls += 1
        if self._is_refused:
            self._leave()

    def _capture(self, arena: _Arena) -> None:
        arena.stream.begin_capture()  # in relaxed mode, which lets the pool grow
        reason: str | None = "interrupted"
        graph = None
        try:
            arena.call(self._function)
            reason = None
        except Exception as error:  # noqa: BLE001 # errors of the libraries have no common class
            reason = one_line(error)
        finally:  # also after Ctrl-C: what follows would be captured for good
            try:
                graph = arena.stream.end_capture()
            except RuntimeError as error:
                reason = reason or one_line(error)
            if reason is not None:
                vars(_arenas).pop(self._key, None)  # later graphs get another stream
        self._is_refused = reason is not None
        self._graph = None if self._is_refused else graph
        if self._is_refused:
            message = f"a step cannot be captured as a CUDA graph and runs without one: {reason}"
            warnings.warn(message, stacklevel=2)
