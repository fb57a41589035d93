"""Programs: a function on arrays of fixed shapes that runs without its Python code.

`Program` on NumPy executes the calls of a graph, `CudaProgram` on CuPy launches a CUDA graph.
"""

from __future__ import annotations

import bisect
import copy
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from xformer import native
from xformer.backends import array_namespace
from xformer.backends.arrays import check_class, is_of_numpy
from xformer.errors import JitError
from xformer.tracing.activations import note_copy
from xformer.tracing.arguments import arrays_of
from xformer.tracing.graph import WRITES_CONSTANT, Call, Constant, GraphTrace, Place, map_places, root_of
from xformer.tree import Module, flatten, is_array, items_of, rebuild_sequence

_RELEASED = 2**24  # bytes of a program from which on the free memory of its trace is worth returning


class Program:
    """The array operations of `function(*args, **keywords)` on NumPy.

    Args:
        function: Its arguments and its result are trees of arrays; an argument may also be an object whose arrays the
            function updates in place, such as a DecodingCache.
        args: Positional arguments. Runs read and write their arrays where they are.
        keywords: Keyword arguments.
        data: Those arrays of the arguments that a run overwrites with new values.
        numbers: Positions of data that stand for immutable numbers, such as numpy.float64.

    Attributes:
        result: Result of the first call.
        written: Positions of data that the function writes.
        constants: Plain arrays that the function uses.
        nbytes: Size of the memory that temporaries share.

    Raises:
        JitError: If the function reads values of arrays on the host.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        keywords: dict[str, Any],
        data: Sequence[Any] = (),
        numbers: Collection[int] = (),
    ) -> None:
        self._data, trace = data, GraphTrace()
        immutable = {id(data[position]) for position in numbers}
        with trace.record():
            traced_args, traced_keywords = _map_arrays(
                lambda array: trace.wrap(array, is_number=id(array) in immutable), (tuple(args), keywords), {}
            )
            result = _map_arrays(trace.unwrap_result, function(*traced_args, **traced_keywords), {})
            trace.pass_arrays()
        arguments = (*args, *keywords.values())
        constants = trace.constants
        calls = place_constants(trace.take_calls(), constants, are_kept=trace.are_kept)
        self.constants = [constant.array for constant in constants.values()]
        written = {id(root_of(array)) for call in calls for array in call.outputs}
        self.written = [position for position, array in enumerate(data) if id(root_of(array)) in written]
        calls, self.nbytes = share_memory(calls, [*arrays_of(arguments), *flatten(result)[0]])
        self._steps = list(_steps([call for call in calls if not call.is_check]))
        self._checks = [call for call in calls if call.is_check]
        self._build = _builder(result, arguments, data)
        self.result = self._build()
        if self.nbytes > _RELEASED:
            native.release_memory()

    def run(self, data: Sequence[Any] = ()) -> Any:
        """Run the program.

        Args:
            data: New values of the data.

        Returns:
            The result, in new arrays except for arrays of the arguments.
        """
        for target, source in zip(self._data, data, strict=True):
            np.copyto(target, source)
        self.repeat(1)
        self.write_back(data)
        return self._build()

    def repeat(self, count: int) -> None:
        """Run the program several times with the same data, which it may advance by itself."""
        is_native = len(self._steps) == 1 and isinstance(self._steps[0][0], native.Program)
        steps = [(self._steps[0][0], (count,))] if is_native else self._steps * count
        try:
            for function, args in steps:
                function(*args)
        except IndexError:
            for check in self._checks:
                check.function(*check.args)  # type: ignore[operator]
            raise

    def write_back(self, data: Sequence[Any]) -> None:
        """Copy what the function has written into its data to the arrays of the caller."""
        for position in self.written:
            np.copyto(data[position], self._data[position])


def _steps(calls: Sequence[Call]) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Yield functions with their arguments; neighboring calls of the native library become one of them."""
    for is_native, group in itertools.groupby(calls, key=lambda call: isinstance(call.function, str)):
        if is_native:
            yield native.Program((call.function, *call.args) for call in group), ()
        else:
            yield from ((call.function, call.args) for call in group)  # type: ignore[misc]


class CudaProgram(Program):
    """The kernels of `function(*args, **keywords)` on CuPy, launched as a CUDA graph; see `Program`.

    The function must not write into data.
    """

    def __init__(
        self,
        capture_graph: Callable[..., Callable[[], None]],
        function: Callable[..., Any],
        args: Sequence[Any],
        keywords: dict[str, Any],
        data: Sequence[Any] = (),
        numbers: Collection[int] = (),
    ) -> None:
        self._data, self.written, self.constants = data, [], []
        copied, options = _map_arrays(lambda array: array, (args, keywords), {})
        # Weak, so that a program can be a value of a WeakKeyDictionary whose key is the model.
        references = [weakref.ref(arg) if isinstance(arg, Module) else arg for arg in copied]

        def call(copy: Callable[[Any], Any] = array_copy) -> None:
            # Copies of objects, because the caller may assign other arrays to the originals.
            given = [arg() if isinstance(arg, weakref.ref) else arg for arg in references]
            arguments, named = _map_arrays(lambda array: array, (given, options), {})
            result, kept = function(*arguments, **named), []

            def keep(array: Any) -> Any:  # the next graph would overwrite it
                kept.append(copy(array))
                return kept[-1]

            self._build, self._kept = _builder(result, (*arguments, *named.values()), data, keep), kept

        self._graph, self._arguments = capture_graph(call), list(arrays_of((tuple(args), keywords)))
        self.result = self.run(data)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Size of the arrays that it keeps; its temporaries are in memory that all graphs share."""
        return sum(array.nbytes for array in (*self._data, *self._kept))

    def run(self, data: Sequence[Any] = ()) -> Any:
        """Launch the graph; return its result in new arrays except for arrays of the arguments."""
        for target, source in zip(self._data, data, strict=True):
            is_moved = is_of_numpy(source) and not is_of_numpy(target)
            target[...] = array_namespace(target).from_host(source) if is_moved else source
        self._graph()
        return self._build()

    def repeat(self, count: int) -> None:
        """Launch the graph several times; see `Program`."""
        for _ in range(count):
            self._graph()


def _builder(
    result: Any, arguments: Sequence[Any], data: Sequence[Any], keep: Callable[[Any], Any] = lambda array: array
) -> Callable[[], Any]:
    """Return a function that builds a result: arrays of the arguments are kept, data and other arrays are copied.

    The others are copied from `keep(array)`.
    """
    is_data = set(map(id, data))
    known = {_memory(array): array for array in arrays_of(tuple(arguments)) if id(array) not in is_data}
    modules = [item for item in items_of(tuple(arguments)) if isinstance(item, Module)]
    return _build(result, known, modules, keep)


def _build(tree: Any, known: dict[Any, Any], modules: list[Module], keep: Callable[[Any], Any]) -> Callable[[], Any]:
    if isinstance(tree, tuple | list):
        items = [_build(item, known, modules, keep) for item in tree]
        return lambda: rebuild_sequence(tree, (build() for build in items))
    leaves, rebuild = flatten(tree)
    arrays = [known.get(_memory(leaf)) for leaf in leaves]
    if all(array is not None for array in arrays):
        constant = rebuild(arrays) if leaves else tree
        same = (module for module in modules if list(map(id, flatten(module)[0])) == list(map(id, arrays)))
        constant = next(same, constant) if isinstance(tree, Module) else constant
        return lambda: constant
    pairs = [(keep(leaf) if array is None else None, array) for leaf, array in zip(leaves, arrays, strict=True)]
    return lambda: rebuild([array_copy(leaf) if array is None else array for leaf, array in pairs])


def array_copy(array: Any, xp: Any = None) -> Any:
    """Return a copy of an array of NumPy or CuPy, in the same memory order; with `xp`, an array of this library."""
    if xp is not None and xp.name != "numpy" and is_of_numpy(array):
        return xp.from_host(array)
    return np.array(array) if isinstance(array, np.ndarray | np.generic) else array.copy(order="K")


def compiler(xp: Any) -> Callable[..., Program] | None:
    """Return the class of programs for a library, or None."""
    if xp.name == "numpy":
        return Program
    capture_graph = xp.graph_capture()
    return None if capture_graph is None else functools.partial(CudaProgram, capture_graph)


class Intervals:
    """The memory of arrays of NumPy or CuPy.

    Raises:
        BackendError: If an array is one of a subclass of np.ndarray; see `check_class`.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        arrays = list(arrays)
        roots = [root_of(array) if isinstance(array, np.ndarray) else None for array in arrays]
        owners = (root is not None and root.flags.owndata for root in roots)
        self._owners = set(map(id, roots)) if all(owners) else None  # the arrays that own this memory, if all are known
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(map(_bounds, arrays)):
            if self._ends and start < self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def overlap(self, array: Any) -> bool:
        """Return whether an array has some of this memory."""
        if self._owners is not None and type(array) is np.ndarray and (root := root_of(array)).flags.owndata:
            return id(root) in self._owners and self._overlap(array)
        return self._overlap(array)

    def _overlap(self, array: Any) -> bool:
        start, end = _bounds(array)
        index = bisect.bisect_left(self._starts, end) - 1
        return index >= 0 and self._ends[index] > start


def _bounds(array: Any) -> tuple[int, int]:
    """Return the addresses of the first byte of an array and of that after its last one."""
    check_class(array)
    if isinstance(array, np.generic):
        return 0, 0
    if not isinstance(array, np.ndarray):
        start = array.data.ptr
        return start, start + array.nbytes
    if array.flags.c_contiguous:
        start = array.__array_interface__["data"][0]
        return start, start + array.nbytes
    return np.lib.array_utils.byte_bounds(array)


def _memory(array: Any) -> Any:
    """Return a key that is equal for arrays of NumPy or CuPy at the same address with the same layout."""
    if isinstance(array, np.generic):
        return None
    pointer = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return pointer, array.shape, array.strides, array.dtype.str


def _map_arrays(function: Callable[[Any], Any], value: Any, copies: dict[int, Any]) -> Any:
    """Apply a function to the arrays of a tree and of the objects in it, which are copied with what they share.

    A Module whose arrays stay the same is not copied.
    """
    if is_array(value):
        return function(value)
    if isinstance(value, Module):
        leaves, rebuild = flatten(value)
        mapped = [function(leaf) for leaf in leaves]
        if all(map(operator.is_, mapped, leaves)):
            return value
        note_copy(value, copied := rebuild(mapped))
        return copied
    if isinstance(value, tuple | list):
        return rebuild_sequence(value, (_map_arrays(function, item, copies) for item in value))
    if isinstance(value, dict):
        return {name: _map_arrays(function, item, copies) for name, item in value.items()}
    if type(value).__module__.startswith("xformer.") and hasattr(value, "__dict__") and not isinstance(value, type):
        if id(value) not in copies:
            copies[id(value)] = duplicate = copy.copy(value)
            for name, item in vars(value).items():
                duplicate.__dict__[name] = _map_arrays(function, item, copies)
        return copies[id(value)]
    return value


# --- Memory: constants are read where they are, and temporaries share it ----------------------------------------------
#
# A temporary is memory that a call writes and that does not belong to the caller. It is alive from the first call that
# has it among its arguments to the last. All of them become views of one array, at offsets that a first pass over the
# calls assigns.


def place_constants(calls: Sequence[Call], constants: dict[int, Constant], *, are_kept: bool) -> list[Call]:
    """Let a program read constants where they are, so that its runs see what is written into them in between.

    An array that the function makes and writes itself has the same values in each run: those of the copies. If others
    can read such an array too, its values in the next run are unknown.

    Args:
        calls: The calls of a graph.
        constants: Its constants.
        are_kept: Whether those without copies were not written.

    Raises:
        JitError: If the function writes into an array of others after it was used.
    """
    written = {id(root_of(constant.array)) for constant in constants.values() if constant.is_written()}
    moved_away = [
        constants.pop(key) for key, constant in list(constants.items()) if id(root_of(constant.array)) in written
    ]
    others = [weakref.ref(array) for constant in moved_away for array in (constant.array, root_of(constant.array))]
    moved_away.clear()  # so that these arrays are freed, unless others refer to them
    if not are_kept or any(other() is not None for other in others):
        raise JitError(WRITES_CONSTANT)
    refreshes, sources = [], {}
    for array, copies in constants.values():
        if len(copies) > 1 or copies[0] is array:
            continue
        if array.flags.forc and array.strides == copies[0].strides:
            sources[id(copies[0])] = _bytes_of(array)
        else:
            refreshes.append(Call(np.copyto, (copies[0], array), (copies[0],)))

    def move(array: Any) -> Any:
        copy = root_of(array)
        if type(array) is Place or id(copy) not in sources:
            return array
        offset = array.ctypes.data - copy.ctypes.data
        return np.ndarray(array.shape, array.dtype, sources[id(copy)], offset, array.strides)

    moved = [call._replace(args=map_places(move, call.args)) for call in calls] if sources else calls
    return [*refreshes, *moved]


def share_memory(calls: Sequence[Call], kept: Iterable[Any]) -> tuple[list[Call], int]:
    """Move the temporaries of some calls into one array.

    Args:
        calls: The calls of a graph, in order.
        kept: Arrays that must keep their memory: those of the caller, and results.

    Returns:
        The calls with arrays in the shared memory, and its size in bytes.
    """
    kept_roots = {id(root): root for root in map(_reference, kept)}
    places = [_place(array) for call in calls for array in call.outputs]
    roots = {id(place.root): place for place in places if id(place.root) not in kept_roots}
    lifetimes = _lifetimes(calls, roots)
    offsets, size = _assign_offsets(lifetimes, {key: roots[key].nbytes for key in lifetimes})
    memory = native.aligned_empty((size,), np.uint8)

    def move(array: Any) -> Any:
        offset = offsets.get(id(_reference(array)))
        if offset is not None:
            return _place(array).array_in(memory, offset)
        return array.array_in(_bytes_of(array.root())) if type(array) is Place else array

    return [call._replace(args=map_places(move, call.args)) for call in calls], size


def _reference(array: Any) -> weakref.ref[Any]:
    """Return the reference to the array that owns the memory, one object for each."""
    return array.root if type(array) is Place else weakref.ref(root_of(array))


def _place(array: Any) -> Place:
    return array if type(array) is Place else Place.of(array, _reference(array))


def _lifetimes(calls: Sequence[Call], roots: Mapping[int, Any]) -> dict[int, list[int]]:
    """Return the indices of the first and the last call of each temporary."""
    lifetimes: dict[int, list[int]] = {}
    for index, call in enumerate(calls):

        def visit(array: Any, index: int = index) -> None:
            if (key := id(_reference(array))) in roots:
                lifetimes.setdefault(key, [index, index])[1] = index

        map_places(visit, call.args)
    return lifetimes


def _bytes_of(array: Any) -> Any:
    """Return the memory of an array that is contiguous in the order of C or Fortran."""
    return (array if array.flags.c_contiguous else array.T).reshape(-1).view(np.uint8)


def _assign_offsets(lifetimes: dict[int, list[int]], sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Place each temporary, the largest first, at the lowest offset that is free during its lifetime.

    Returns:
        The offset of each temporary, and the total size.
    """
    keys = sorted(lifetimes, key=lambda key: (-sizes[key], lifetimes[key]))
    first, last = np.asarray([lifetimes[key] for key in keys], dtype=np.int64).reshape(-1, 2).T
    starts, ends = np.zeros((2, len(keys)), dtype=np.int64)
    for index, key in enumerate(keys):
        size = -(-max(sizes[key], 1) // native.CACHE_LINE) * native.CACHE_LINE
        used = np.flatnonzero((first[:index] <= last[index]) & (last[:index] >= first[index]))
        used = used[np.argsort(starts[used])]
        gap_starts = np.maximum.accumulate([0, *ends[used]])
        gap_ends = np.append(starts[used], np.iinfo(np.int64).max)
        starts[index] = gap_starts[np.argmax(gap_ends - gap_starts >= size)]
        ends[index] = starts[index] + size
    return dict(zip(keys, starts.tolist(), strict=True)), int(ends.max(initial=0))
