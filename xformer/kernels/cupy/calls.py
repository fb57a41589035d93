"""Calls of operations that repeat: those with the dtypes, shapes, strides and options of an earlier call.

The first call of a kind chooses a kernel and records what this enqueues by `enqueue` and allocates by `launch.empty`.
If these are all arrays that it reads, writes and returns, later calls enqueue the same at once. So a kernel may compute
further arrays by functions of CuPy, which keeps its calls from being repeated. If such a function writes to an array
that the kernel got or allocated, the kernel must say so by `forbid_repeating`.
"""

from __future__ import annotations

import functools
import importlib
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.backends.library import Library
from xformer.ops.operation import SELECTIONS, Kernel, Operation

_MAX_CALLS = 4096
pointer = operator.attrgetter("data.ptr")  # the device address of an array; called without a frame
_Output = tuple[int, Any]  # the place of an allocation, and what `view` takes; None if it is the output itself


class _Call(NamedTuple):
    """A kind of call: the kernels of the operation, the one that runs, and what it does if that can be repeated.

    Each step has a function, its first arguments, a list of others, and the places of arrays in this list and among the
    arrays of the call and the allocations.
    """

    kernels: list[Kernel]
    kernel: Kernel
    steps: list[tuple[Any, tuple[Any, ...], list[Any], list[tuple[int, int]]]]
    allocations: list[tuple[tuple[int, ...], Any]]  # shapes and dtypes
    outputs: list[_Output]
    is_tuple: bool
    distances: list[tuple[int, int, int]]  # places of two arrays, and what lies between their addresses


class _Recording:
    """The launches and allocations of a call; arrays that share their first element could not be told apart."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        self.owned, self.count = list(arrays), len(arrays)
        self.places = {address(array): place for place, array in enumerate(arrays) if array is not None}
        self.is_complete = len(self.places) == sum(array is not None for array in arrays)
        self.steps: list[Any] = []
        self.distances: list[tuple[int, int, int]] = []

    def add(self, function: Any, head: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
        known = [x if _is_known(x) else None for x in arguments]  # arrays would keep their memory
        places = [(i, self.places.get(address(x), -1)) for i, x in enumerate(arguments) if known[i] is None]
        self.is_complete = self.is_complete and all(place >= 0 for _, place in places)
        self.steps.append((function, head, known, places))

    def output(self, y: Any) -> _Output:
        for place, owned in enumerate(self.owned[self.count :], self.count):
            offset = address(y) - address(owned)
            if 0 <= offset < owned.nbytes and y.dtype == owned.dtype:
                is_whole = (y.shape, y.strides) == (owned.shape, owned.strides)
                return place, None if is_whole else (offset, y.shape, y.strides)
        self.is_complete = False
        return -1, None

    def call(self, kernels: Any, kernel: Kernel, result: Any) -> _Call:
        outputs = [self.output(y) for y in (result if isinstance(result, tuple) else (result,))]
        allocations = [(array.shape, array.dtype) for array in self.owned[self.count :]]
        steps = self.steps if self.is_complete else []
        return _Call(kernels, kernel, steps, allocations, outputs, isinstance(result, tuple), self.distances)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: dict[Hashable, _Call] = {}
        self.recording: _Recording | None = None


_THREAD = _Thread()


def _is_known(argument: Any) -> bool:
    """Return whether an argument is the same in all calls: a number, or a table of strides; one of addresses is not."""
    is_table = type(argument) is np.ndarray and argument.dtype.names is not None and not argument.flags.writeable
    return is_table or type(argument) in (int, float)


def address(argument: Any) -> int:
    """Return the device address of an array, or -1 for anything else."""
    try:
        return pointer(argument)
    except AttributeError:
        return -1


def view(array: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return an array in the memory of another one."""
    return type(array)(shape, array.dtype, array.data + offset, strides)


def enqueue(function: Callable[..., Any], head: tuple[Any, ...], arguments: tuple[Any, ...]) -> None:
    """Call function(*head, arguments), which enqueues work of arrays and numbers, the arguments."""
    function(*head, arguments)
    if (recording := _THREAD.recording) is not None:
        recording.add(function, head, arguments)


def allocated(array: Any) -> Any:
    """Return a new array, which calls that repeat allocate, too."""
    if (recording := _THREAD.recording) is not None:
        recording.places[address(array)] = len(recording.owned)
        recording.owned.append(array)
    return array


def forbid_repeating() -> None:
    """Keep this call from being repeated: it depends on addresses, or a function of CuPy writes to its arrays."""
    if (recording := _THREAD.recording) is not None:
        recording.is_complete = False


def repeat_at_distances(arrays: Sequence[Any]) -> None:
    """Let this call be repeated only with arrays that are as far from each other in memory."""
    if (recording := _THREAD.recording) is not None:
        places, start = [recording.places.get(address(array), -1) for array in arrays], address(arrays[0])
        recording.is_complete = recording.is_complete and min(places) >= 0
        recording.distances += [(places[0], i, address(x) - start) for i, x in zip(places, arrays, strict=True)]


@functools.cache
def _get_device() -> Callable[[], int]:
    return importlib.import_module("cupy").cuda.runtime.getDevice


def apply(library: Library, operation: Operation, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Compute an operation; see `Library.apply`."""
    parts: list[Any] = [operation, _get_device()()]
    try:
        for array in arrays:
            if array is None:
                parts.append(None)
            else:
                data = array.data
                parts += array.dtype, array.shape, array.strides, data.ptr % 256, data.device_id
        key = *parts, *options.items()
        call = _THREAD.calls.get(key)
    except (AttributeError, TypeError):  # an array of another library, or an option that is an array
        return Library.apply(library, operation, arrays, options)
    is_observed = SELECTIONS.blocks or _THREAD.recording is not None  # by `explain`, or by a kernel that calls this one
    if call is None or call.kernels is not library.kernels.get(operation.name) or is_observed:
        return _first(key, library, operation, arrays, options)
    is_apart = call.distances and any(pointer(arrays[j]) - pointer(arrays[i]) != size for i, j, size in call.distances)
    if not call.steps or is_apart:
        return call.kernel.forward(*arrays, save=False, **options)[0]
    owned = [*arrays, *[type(arrays[0])(shape, dtype) for shape, dtype in call.allocations]]
    for function, head, arguments, places in call.steps:
        arguments = arguments.copy()
        for index, place in places:
            arguments[index] = owned[place]
        function(*head, tuple(arguments))
    outputs = [owned[place] if part is None else view(owned[place], *part) for place, part in call.outputs]
    return tuple(outputs) if call.is_tuple else outputs[0]


def _first(key: Hashable, library: Library, operation: Operation, arrays: Any, options: dict[str, Any]) -> Any:
    dtype = operation.signature.check(operation.name, arrays)
    kernel = operation.select(library, arrays, options, dtype, save=False)
    if _THREAD.recording is not None:  # by a kernel, whose call records this one
        return kernel.forward(*arrays, save=False, **options)[0]
    recording = _Recording(arrays)
    if library.other_device(arrays) is None and kernel.backend:
        _THREAD.recording = recording
    try:
        result = kernel.forward(*arrays, save=False, **options)[0]
    finally:
        _THREAD.recording = None
    if len(_THREAD.calls) >= _MAX_CALLS:
        _THREAD.calls.clear()
    _THREAD.calls[key] = recording.call(library.kernels[operation.name], kernel, result)
    return result
