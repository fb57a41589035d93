"""What speed asks of the process and the system: threads, what becomes of freed memory, memory shared by processes.

Nothing here runs by itself. The command line calls `keep_freed_memory()` when it starts; in a library the process is
yours, so call it yourself before training on NumPy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from xformer.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Item = TypeVar("Item")
Result = TypeVar("Result")
ArraySpec = tuple[tuple[int, ...], Any]  # shape and dtype

_MEBIBYTE = 1 << 20
# Parameters of glibc's mallopt(3), from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next allocation, instead of giving it back to the kernel.

    A training step frees and allocates the same hundreds of megabytes again; memory that comes from the kernel costs a
    page fault for every 4 KiB. All threads share one pool. The process will not shrink any more while it runs.

    Returns False, and does nothing, where the C library is not glibc.
    """
    if not _is_glibc():
        return False
    mallopt = importlib.import_module("ctypes").CDLL(None).mallopt
    settings = {
        _MMAP_MAX: 0,  # however large: the logits of a large batch are hundreds of megabytes
        _TRIM_THRESHOLD: 2**31 - 1,
        _TOP_PAD: 64 * _MEBIBYTE,
        _ARENA_MAX: 1,
    }
    accepted = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(accepted)


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # no confstr on Windows, no such name on other systems
        return False


def available_threads() -> int:
    """How many threads may compute: XFORMER_NUM_THREADS, or as many as the cores that this process may run on.

    Raises ConfigError when XFORMER_NUM_THREADS is not a positive whole number.
    """
    setting = os.environ.get("XFORMER_NUM_THREADS", "").strip()
    if setting:
        if not setting.isdecimal() or int(setting) < 1:
            raise ConfigError(f"XFORMER_NUM_THREADS is {setting!r}; expected a whole number of at least 1")
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def blas_threads(count: int) -> Iterator[bool]:
    """Hold the linear algebra libraries to at most `count` threads inside the block, whatever it was outside.

    A library that is held to fewer already, by OPENBLAS_NUM_THREADS for example, stays there. It must be loaded by
    then: import numpy first. Yields False, and does nothing, where threadpoolctl is absent.
    """
    if importlib.util.find_spec("threadpoolctl") is None:
        yield False
        return
    pools = importlib.import_module("threadpoolctl").ThreadpoolController().select(user_api="blas")
    limits: dict[str, int] = {}
    for pool in pools.info():
        name = pool["prefix"]  # NumPy and SciPy may each bring one of the same name
        limits[name] = min(count, pool["num_threads"], limits.get(name, count))
    with pools.limit(limits=limits):
        yield True


def one_blas_thread() -> contextlib.AbstractContextManager[bool]:
    """`blas_threads(1)`."""
    return blas_threads(1)


_MOST_WORKERS = 256
_workers: list[ThreadPoolExecutor] = []
_IS_SIDE: ContextVar[bool] = ContextVar("is_side", default=False)


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return [function(item) for item in items], each item on a thread of its own, the first on this one.

    It pays where the time goes to code that lets other threads run, as NumPy does inside its loops and products. A
    call within a call runs its items one after the other: the threads are busy already.
    """
    items = list(items)
    if len(items) < 2 or _IS_SIDE.get():
        return [function(item) for item in items]
    futures = importlib.import_module("concurrent.futures")
    if not _workers:
        _workers.append(futures.ThreadPoolExecutor(_MOST_WORKERS, thread_name_prefix="xformer"))
    others = [_workers[0].submit(copy_context().run, _side, function, item) for item in items[1:]]
    try:
        first = beside_others(function, items[0])
    finally:
        futures.wait(others)  # nothing may still be at work on the caller's arrays when an error leaves here
    return [first, *(other.result() for other in others)]


def spread(function: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call the function with each item, on as many threads as there are, the linear algebra library on one in each."""
    threads = 1 if _IS_SIDE.get() else min(available_threads(), len(items))
    if threads < 2:
        _each(function, items)
        return
    with blas_threads(1):
        side_by_side(functools.partial(_each, function), [items[first::threads] for first in range(threads)])


def _each(function: Callable[[Item], None], items: Sequence[Item]) -> None:
    for item in items:
        function(item)


def beside_others(function: Callable[[Item], Result], item: Item) -> Result:
    """Call the function while other processes keep the other cores busy: what it calls starts no threads."""
    return copy_context().run(_side, function, item)


def _side(function: Callable[[Item], Result], item: Item) -> Result:
    _IS_SIDE.set(True)
    return function(item)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_workers.clear)  # threads do not survive a fork

_ALIGNMENT = 64  # bytes of a cache line


def can_share_memory() -> bool:
    """Tell whether `SharedArrays` works here: it needs anonymous files in memory, which Linux has."""
    return hasattr(os, "memfd_create")


class SharedArrays:
    """NumPy arrays that several processes see: one makes them, others open them by the file descriptor they inherit.

    specs: shape and dtype of each array. descriptor: None makes new memory, filled with zeros.
    """

    def __init__(self, specs: Sequence[ArraySpec], descriptor: int | None = None) -> None:
        mmap, numpy = importlib.import_module("mmap"), importlib.import_module("numpy")
        counts = [math.prod(shape) for shape, _ in specs]
        starts = [0]
        for count, (_, dtype) in zip(counts, specs, strict=True):
            starts.append(starts[-1] + -(-count * numpy.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT)
        size = max(starts[-1], 1)
        if descriptor is None:
            descriptor = os.memfd_create("xformer")
            os.ftruncate(descriptor, size)
        self.descriptor = descriptor
        memory = mmap.mmap(descriptor, size)
        self.arrays: list[Any] = [
            numpy.frombuffer(memory, dtype, count, start).reshape(shape)
            for (shape, dtype), count, start in zip(specs, counts, starts[:-1], strict=True)
        ]

    def close(self) -> None:
        """Give the descriptor back; the memory itself goes with the last array, of whichever process."""
        os.close(self.descriptor)
