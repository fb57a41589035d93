"""What speed asks of the process and the system: threads, what becomes of freed memory, memory shared by processes.

Nothing here runs by itself. The command line calls `disable_malloc_trim()` when it starts; in a library the process is
yours, so call it yourself before training on NumPy.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from typing import TYPE_CHECKING, Any, TypeVar

from xformer.environment import env_value
from xformer.errors import ConfigError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Item = TypeVar("Item")
Result = TypeVar("Result")

_MEBIBYTE = 1 << 20
_MOST_THREADS = 4096  # far more than help anywhere; a run is cut into as many parts for good
# Parameters of glibc's mallopt(3), from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def disable_malloc_trim() -> bool:
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
    except (AttributeError, ValueError, OSError):  # no confstr on TextChunks, no such name on other systems
        return False


_explicit: list[int] = []  # what set_num_threads was told


def set_num_threads(count: int) -> None:
    """Compute on `count` threads from now on, in the whole process: xformer, NumPy's matrix products, and torch.

    A library that is not loaded yet follows with its first array. Matrix products take threadpoolctl; it warns where
    that is absent. Raises ConfigError unless `count` is a whole number from 1 to 4096.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_THREADS:
        raise ConfigError(f"set_num_threads got {count!r}; expected a whole number from 1 to {_MOST_THREADS}")
    _explicit[:] = [count]
    apply_thread_limits()
    if importlib.util.find_spec("threadpoolctl") is None:
        warnings.warn("NumPy's matrix products keep their threads: threadpoolctl is not installed", stacklevel=2)


def num_threads() -> int:
    """How many threads may compute: what `set_num_threads` said, else XFORMER_NUM_THREADS, else the process's cores.

    Raises ConfigError unless XFORMER_NUM_THREADS is a whole number from 1 to 4096.
    """
    return _requested_threads() or (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )


def _requested_threads() -> int:
    """0: none."""
    setting = env_value("XFORMER_NUM_THREADS")
    if _explicit or not setting:
        return sum(_explicit)
    if not setting.isdecimal() or not 1 <= int(setting) <= _MOST_THREADS:
        env_value.cache_clear()  # once it is mended, it is read again
        raise ConfigError(f"XFORMER_NUM_THREADS is {setting!r}; expected a whole number from 1 to {_MOST_THREADS}")
    return int(setting)


def apply_thread_limits() -> None:
    """Set loaded libraries to what `set_num_threads` said, or lower them to XFORMER_NUM_THREADS, and limit them all."""
    wish = _requested_threads()
    torch: Any = sys.modules.get("torch")
    if wish and hasattr(torch, "set_num_threads"):  # False while it is imported
        torch.set_num_threads(wish if _explicit else min(wish, torch.get_num_threads()))
    with _LOCK:
        for library in _linear_algebra(len(sys.modules)) if wish else ():
            place = _place(library)
            _usual[place] = wish if _explicit else min(wish, _usual.get(place, library.num_threads))
        _apply_limits()


at_fork: Callable[..., None] = getattr(os, "register_at_fork", lambda **handlers: None)


def fork_safe_lock() -> Any:
    """A lock that no other thread holds while the process forks."""
    lock = threading.RLock()
    at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


_LOCK = fork_safe_lock()
_limits: list[tuple[int, int]] = []  # thread and count of each block that runs
_usual: dict[tuple[str, int | None], int] = {}  # what a library (by `_place`) goes back to without limits


@contextlib.contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Hold the linear algebra libraries to at most `count` threads inside the block.

    They must be loaded by then: import numpy first. Of several threads' blocks the lowest limit holds; the last to end
    restores what was before the first. Does nothing where threadpoolctl is absent.
    """
    limit = threading.get_ident(), count
    try:
        with _LOCK:
            _limits.append(limit)
            _apply_limits()
        yield
    finally:
        with _LOCK:
            _limits.remove(limit)
            _apply_limits()


@functools.lru_cache(maxsize=1)
def _linear_algebra(modules: int) -> list[Any]:
    """modules: how many are imported; a new one may bring a library."""
    if importlib.util.find_spec("threadpoolctl") is None:
        return []
    controller = importlib.import_module("threadpoolctl").ThreadpoolController()
    return controller.select(user_api="blas").lib_controllers  # type: ignore[no-any-return]


def _place(library: Any) -> tuple[str, int | None]:
    """Its file, and the thread where it keeps a number for each."""
    by_thread = library.internal_api == "mkl" or getattr(library, "threading_layer", "") == "openmp"
    return library.filepath, threading.get_ident() if by_thread else None


def _apply_limits() -> None:
    for library in _linear_algebra(len(sys.modules)):
        place = _place(library)
        counts = [count for thread, count in _limits if place[1] in (None, thread)]
        if not counts and place not in _usual:
            continue
        now = library.num_threads
        wanted = min([_usual.setdefault(place, now), *counts])
        if wanted != now:
            library.set_num_threads(wanted)
            if hasattr(library, "clear_controlling_thread"):
                library.clear_controlling_thread()  # or no other thread can set it
        if not counts:
            del _usual[place]


_MOST_WORKERS = 256
_workers: list[ThreadPoolExecutor] = []
_IS_SIDE: ContextVar[bool] = ContextVar("is_side", default=False)


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return [function(item) for item in items], on `num_threads()`, this one among them.

    It pays where code lets other threads run, as NumPy does inside its loops and products. A call within a call takes
    no more threads.
    """
    items = list(items)
    threads = _threads_for(items)
    if threads < 2:
        return [function(item) for item in items]
    futures = importlib.import_module("concurrent.futures")
    if not _workers:
        _workers.append(futures.ThreadPoolExecutor(_MOST_WORKERS, thread_name_prefix="xformer"))
    limit = min((count for thread, count in [*_limits] if thread == threading.get_ident()), default=None)
    parts = [functools.partial(_each, function, items[first::threads], limit) for first in range(threads)]
    others = [_workers[0].submit(copy_context().run, part) for part in parts[1:]]
    try:
        done = [copy_context().run(parts[0])]
    finally:
        futures.wait(others)  # nothing may still be at work on the caller's arrays when an error leaves here
    done += [other.result() for other in others]
    return [done[number % threads][number // threads] for number in range(len(items))]


def parallel_for(function: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call the function with each item `parallel_map`, the linear algebra library on one thread in each."""
    with blas_threads(1) if _threads_for(items) > 1 else contextlib.nullcontext():
        parallel_map(function, items)


def available_threads() -> int:
    """How many threads `parallel_map` takes at most: one inside another call, else `num_threads()`."""
    return 1 if _IS_SIDE.get() else num_threads()


def _threads_for(items: Sequence[Any]) -> int:
    return min(available_threads(), len(items))


def _each(function: Callable[[Item], Result], items: Sequence[Item], limit: int | None) -> list[Result]:
    _IS_SIDE.set(True)
    with contextlib.nullcontext() if limit is None else blas_threads(limit):
        return [function(item) for item in items]


def run_serially(function: Callable[[Item], Result], item: Item) -> Result:
    """Call the function while other processes keep the other cores busy: it takes no more threads."""
    return copy_context().run(_each, function, [item], None)[0]


def _after_fork() -> None:
    """Forget the threads that did not come along."""
    _workers.clear()
    here = [limit for limit in _limits if limit[0] == threading.get_ident()]
    if here != _limits:
        _limits[:] = here
        _apply_limits()


at_fork(after_in_child=_after_fork)
