"""Threads of the process: their number, limits of the linear algebra libraries, and parallel loops.

Nothing here runs by itself. The command line calls `disable_malloc_trim()` when it starts; programs that train on NumPy
should call it too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import operator
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from typing import Any, Generic, TypeVar

from xformer.environment import clear_cache, env_value, on_clear
from xformer.errors import ConfigError

Item = TypeVar("Item")
Result = TypeVar("Result")

_MEBIBYTE = 1 << 20
_MAX_THREADS = 4096
# Parameters of glibc's mallopt(3), from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8


def disable_malloc_trim() -> bool:
    """Make the C library keep freed memory for later allocations instead of returning it to the kernel.

    A training step frees and allocates the same hundreds of megabytes each time, and memory from the kernel costs a
    page fault for every 4 KiB. All threads share one pool. The process does not shrink while it runs.

    Returns:
        True on success; False if the C library is not glibc, where nothing changes.
    """
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = {
        _MMAP_MAX: 0,  # also large arrays: the logits of a large batch are hundreds of megabytes
        _TRIM_THRESHOLD: 2**31 - 1,
        _TOP_PAD: 64 * _MEBIBYTE,
        _ARENA_MAX: 1,
    }
    accepted = [mallopt(name, value) == 1 for name, value in settings.items()]
    return all(accepted)


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):  # no confstr on Windows, no such name elsewhere
        return False


_requested: int | None = None  # the number passed to set_num_threads


def set_num_threads(count: int) -> None:
    """Set the number of threads of the process, for xformer, NumPy's matrix products and torch.

    Libraries that are not loaded yet follow with their first array. Matrix products require threadpoolctl; a warning is
    issued if it is not installed.

    Args:
        count: Number of threads, 1 to 4096.

    Raises:
        ConfigError: If the number is out of range.
    """
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MAX_THREADS:
        raise ConfigError(f"set_num_threads got {count!r}; expected an integer from 1 to {_MAX_THREADS}")
    global _requested
    _requested = count
    num_threads.cache_clear()
    apply_thread_limits()
    if importlib.util.find_spec("threadpoolctl") is None:
        warnings.warn("set_num_threads has no effect on NumPy's matrix products: install threadpoolctl", stacklevel=2)


@functools.cache  # every call of a kernel needs it
def num_threads() -> int:
    """Return the number given to `set_num_threads`, else XFORMER_NUM_THREADS, else the number of cores of the process.

    Raises:
        ConfigError: If XFORMER_NUM_THREADS is not an integer from 1 to 4096.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return _requested_threads() or cores


on_clear(num_threads.cache_clear)


def _requested_threads() -> int:
    """Return the number that the program or the environment requests, or 0."""
    setting = env_value("XFORMER_NUM_THREADS")
    if _requested or not setting:
        return _requested or 0
    if not setting.isdecimal() or not 1 <= int(setting) <= _MAX_THREADS:
        clear_cache()  # so that a corrected value is read
        raise ConfigError(f"XFORMER_NUM_THREADS is {setting!r}; expected an integer from 1 to {_MAX_THREADS}")
    return int(setting)


def apply_thread_limits() -> None:
    """Set loaded libraries to the requested number of threads; the environment variable only lowers theirs."""
    count = _requested_threads()
    torch: Any = sys.modules.get("torch")
    if count and hasattr(torch, "set_num_threads"):  # it lacks the function while it is being imported
        torch.set_num_threads(count if _requested else min(count, torch.get_num_threads()))
    with _LOCK:
        for library in _blas_libraries(len(sys.modules)) if count else ():
            key = _blas_key(library)
            _unlimited[key] = count if _requested else min(count, _unlimited.get(key, _access(library)[0]()))
        _apply_limits()


at_fork: Callable[..., None] = getattr(os, "register_at_fork", lambda **handlers: None)


def fork_safe_lock() -> Any:
    """Return a lock that no other thread holds while the process forks."""
    lock = threading.RLock()
    at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


_LOCK = fork_safe_lock()
_limits: list[tuple[int, int]] = []  # (thread, count) of each running blas_threads block
_REGISTERED: dict[str, tuple[Callable[[], int], Callable[[int], Any]]] = {}  # by file name
_unlimited: dict[tuple[str, int | None], int] = {}  # threads of a library without limits, by `_blas_key`


@contextlib.contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Limit the linear algebra libraries to `count` threads inside the block.

    If several threads set a limit, the lowest applies; the original value is restored when the last one exits. The
    libraries must be loaded: import numpy first. Without threadpoolctl nothing changes.
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
def _blas_libraries(num_modules: int) -> list[Any]:
    """Return threadpoolctl's controllers, looked up again when modules were imported, which may load a library."""
    if importlib.util.find_spec("threadpoolctl") is None:
        return []
    controller = importlib.import_module("threadpoolctl").ThreadpoolController()
    return controller.select(user_api="blas").lib_controllers


def _blas_key(library: Any) -> tuple[str, int | None]:
    """Return the file of a library, and the present thread if the library has a setting for each thread."""
    is_per_thread = library.internal_api == "mkl" or getattr(library, "threading_layer", "") == "openmp"
    return library.filepath, threading.get_ident() if is_per_thread else None


def register_blas(path: str, get: Callable[[], int], set_: Callable[[int], Any]) -> None:
    """Register functions that get and set the number of threads of a BLAS library, which are then used for its file.

    The native library limits NumPy's BLAS library to one thread while it calls it; the functions ignore this limit.
    """
    _REGISTERED[os.path.basename(path)] = get, set_


def _access(library: Any) -> tuple[Callable[[], int], Callable[[int], Any]]:
    """Return functions that get and set the number of threads of a library."""
    own = (lambda: library.num_threads), library.set_num_threads
    return _REGISTERED.get(os.path.basename(library.filepath), own)


def _apply_limits() -> None:
    for library in _blas_libraries(len(sys.modules)):
        key = _blas_key(library)
        counts = [count for thread, count in _limits if key[1] in (None, thread)]
        if not counts and key not in _unlimited:
            continue
        get, set_ = _access(library)
        current = get()
        target = min([_unlimited.setdefault(key, current), *counts])
        if target != current:
            set_(target)
            if hasattr(library, "clear_controlling_thread"):
                library.clear_controlling_thread()  # otherwise no other thread could set it
        if not counts:
            del _unlimited[key]


@contextlib.contextmanager
def setting(variable: ContextVar[Item], value: Item) -> Iterator[None]:
    """Give a context variable a value inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class Collector(Generic[Item]):
    """Lists of what happens inside a block, in its thread and in the threads of its parallel loops.

    Args:
        name: Name of the context variable.
    """

    def __init__(self, name: str) -> None:
        self._items: ContextVar[list[Item] | None] = ContextVar(name, default=None)
        self.blocks: list[None] = []  # one for each block of any thread; a list, since appending is atomic

    @contextlib.contextmanager
    def collect(self, items: list[Item] | None = None) -> Iterator[list[Item]]:
        """Yield the list that `items()` returns inside the block, by default a new one."""
        items = [] if items is None else items
        self.blocks.append(None)
        try:
            with setting(self._items, items):
                yield items
        finally:
            self.blocks.pop()

    def items(self) -> list[Item] | None:
        """Return the list of the innermost block, or None outside of blocks."""
        return self._items.get() if self.blocks else None  # torch.compile cannot trace context variables


_MAX_WORKERS = 256
_pools: list[ThreadPoolExecutor] = []
IS_WORKER: ContextVar[bool] = ContextVar("is_worker", default=False)  # inside a `parallel_map`
_IS_SERIAL: ContextVar[bool] = ContextVar("is_serial", default=False)


def run_serially() -> contextlib.AbstractContextManager[None]:
    """Let `parallel_map` use this thread alone inside the block, for example because it records what runs there."""
    return setting(_IS_SERIAL, True)


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return [function(item) for item in items], computed on `num_threads()` threads including this one.

    If the function raises errors for several items, that of the first one is raised. Worthwhile for code that releases
    the GIL, as NumPy's loops and matrix products do. Nested calls run serially.
    """
    items = list(items)
    count = _threads_for(items)
    if count < 2 or _IS_SERIAL.get():
        return [function(item) for item in items]
    if not _pools:
        _pools.append(ThreadPoolExecutor(_MAX_WORKERS, thread_name_prefix="xformer"))
    limit = min((limit for thread, limit in [*_limits] if thread == threading.get_ident()), default=None)
    parts = [functools.partial(_run_part, function, items[first::count], limit) for first in range(count)]
    futures = [_pools[0].submit(copy_context().run, part) for part in parts[1:]]
    try:
        outcomes = [copy_context().run(parts[0])]
    finally:
        wait(futures)  # no thread may use the caller's arrays after an error is raised here
    outcomes += [future.result() for future in futures]
    errors = [(len(results) * count + first, error) for first, (results, error) in enumerate(outcomes) if error]
    if errors:
        raise min(errors, key=operator.itemgetter(0))[1]
    return [outcomes[index % count][0][index // count] for index in range(len(items))]


def parallel_for(function: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call a function with each item, in parallel, with the linear algebra library on one thread in each."""
    with blas_threads(1) if _threads_for(items) > 1 else contextlib.nullcontext():
        parallel_map(function, items)


def available_threads() -> int:
    """Return the number of threads of a `parallel_map`: 1 inside another one, else `num_threads()`."""
    return 1 if IS_WORKER.get() else num_threads()


def _threads_for(items: Sequence[Any]) -> int:
    return min(available_threads(), len(items))


def _run_part(
    function: Callable[[Item], Result], items: Sequence[Item], limit: int | None
) -> tuple[list[Result], Exception | None]:
    """Return the results up to the first error, and this error."""
    IS_WORKER.set(True)
    results: list[Result] = []
    with contextlib.nullcontext() if limit is None else blas_threads(limit):
        try:
            for item in items:
                results.append(function(item))
        except Exception as error:  # noqa: BLE001 - parallel_map raises that of the first item
            return results, error
    return results, None


def _after_fork() -> None:
    """Drop the threads of the parent process and their limits."""
    _pools.clear()
    own = [limit for limit in _limits if limit[0] == threading.get_ident()]
    if own != _limits:
        _limits[:] = own
        _apply_limits()


at_fork(after_in_child=_after_fork)
