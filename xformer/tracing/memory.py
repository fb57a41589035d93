"""Memory of a program: constants are read where they are, and temporaries with disjoint lifetimes share memory.

A temporary is memory that a call writes and that does not belong to the caller. It is alive from the first call that
has it among its arguments to the last. All of them become views of one array, at offsets that a first pass over the
calls assigns.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from xformer import native
from xformer.errors import JitError
from xformer.tracing.graph import WRITES_CONSTANT, Call, Constant, Place, map_places, root_of


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
