"""Compilation of float32 kernels by numba, when they are first called, and their defaults as kernels of operations.

A kernel is compiled once for a signature that holds for all shapes, and cached on disk: in the __pycache__ beside its
file, or in numba's cache directory of the user if that is read-only (NUMBA_CACHE_DIR overrides both). numba checks only
the file of the kernel itself for changes, so the cache key also contains a digest of all files of `xformer.ops`.
`XFORMER_BOUNDSCHECK=1` compiles kernels that check their indices, to search for mistakes.

An optional array that is absent is passed as an empty one. `reassoc` allows reordered sums, which vectorization needs;
infinities and NaN are respected.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import cfunc, config, njit
from numba.types import Array, CPointer, float32, int64, void

from xformer.backends.recording import contiguous, current_tape, plain
from xformer.environment import env_flag
from xformer.ops.operation import Kernel
from xformer.threads import apply_thread_limits, fork_safe_lock

if config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")

_REORDERED = {"contract", "reassoc"}
_BOUNDSCHECK = env_flag("XFORMER_BOUNDSCHECK")
_SETTINGS = {"error_model": "numpy", "boundscheck": _BOUNDSCHECK}
_COMPILING = fork_safe_lock()
_LOG = logging.getLogger(__name__)  # the command line prints it

inline = njit(fastmath=_REORDERED, **_SETTINGS)  # a function that kernels call
inline_exact = njit(fastmath={"contract"}, **_SETTINGS)  # the same, with sums in the written order


@functools.cache
def _source_digest() -> str:
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    digest = hashlib.blake2b(b"".join(map(Path.read_bytes, files)), digest_size=6).hexdigest()
    return f"{digest}-checked" if _BOUNDSCHECK else digest


class _Kernel:
    """A function that is compiled at its first call, or loaded from the cache on disk."""

    def __init__(self, function: Callable[..., None], signature: Any) -> None:
        self._function, self._signature, self._compiled = function, signature, None
        function.__qualname__ += f"-{_source_digest()}"  # part of numba's cache key

    def __call__(self, *arguments: Any) -> None:
        compiled, tape = self._compiled or self._compile(), current_tape()
        if tape is not None:
            arguments = plain(arguments)
            (overload,) = compiled.overloads.values()
            tape.append(overload.entry_point, arguments)  # replays need not check the types again
        compiled(*arguments)

    def _compile(self) -> Any:
        with _COMPILING:
            if self._compiled is None:
                start, cached = time.perf_counter(), ", cached for later runs"
                try:
                    compiled, cache_hit = self._build(cache=True)
                except (OSError, RuntimeError):  # no writable directory, or no space
                    (compiled, cache_hit), cached = self._build(cache=False), "; no cache directory is writable"
                if not cache_hit:
                    seconds = time.perf_counter() - start
                    _LOG.info(
                        "compiled %s for this processor in %.1f s%s",
                        self._function.__name__.removesuffix("_kernel"),
                        seconds,
                        cached,
                    )
                self._compiled = compiled
                apply_thread_limits()  # numba loads SciPy's BLAS if SciPy is installed
        return self._compiled

    def _build(self, cache: bool) -> tuple[Any, bool]:
        """Return the compiled function, and whether it was cached."""
        # With an explicit signature it never compiles another one: writable arrays are accepted as read-only ones.
        compiled = njit(self._signature, cache=cache, nogil=True, fastmath=_REORDERED, **_SETTINGS)(self._function)
        return compiled, bool(compiled.stats.cache_hits)


class _ParallelBody(_Kernel):
    """A C callback that threads run on the parts of a job (see thread_pool)."""

    @property
    def address(self) -> int:
        """Address of the C function; compiles it if necessary."""
        return (self._compiled or self._compile()).address

    def _build(self, cache: bool) -> tuple[Any, bool]:
        compiled = cfunc(self._signature, cache=cache, fastmath=_REORDERED, **_SETTINGS)(self._function)
        return compiled, bool(compiled.cache_hits)


def kernel(*types: Any) -> Callable[[Callable[..., None]], _Kernel]:
    """Decorate a function that returns nothing, to be compiled for arguments of these types."""
    return lambda function: _Kernel(function, void(*types))


def parallel_body(function: Callable[..., None]) -> _ParallelBody:
    """Decorate a function of a pointer to a job's state, to be compiled as a C callback."""
    return _ParallelBody(function, void(CPointer(int64)))


def in_array(ndim: int, dtype: Any = float32) -> Any:
    """Return the type of a C-contiguous array that a kernel reads."""
    return Array(dtype, ndim, "C", readonly=True)


def out_array(ndim: int) -> Any:
    """Return the type of a C-contiguous float32 array that a kernel writes."""
    return Array(float32, ndim, "C")


# --- kernels of operations --------------------------------------------------------------------------------------------

# Arguments for optional arrays that are absent.
EMPTY_1D, EMPTY_4D, EMPTY_MASK = np.empty(0, np.float32), np.empty((0,) * 4, np.float32), np.empty((0,) * 4, np.bool_)


def why_not(*arrays: Any, save: bool = False, **options: Any) -> str | None:
    """Return why compiled kernels take no such arrays, or None."""
    for array in arrays:
        if array is not None and not array.flags.aligned:
            return "an array is not aligned in memory"
    return None


def compiled_kernel(
    operation: str, forward: Callable[..., Any], vjp: Callable[..., Any] | None, **options: Any
) -> Kernel:
    """Return a kernel for float32 arrays; the options are fields of `Kernel`."""
    defaults: dict[str, Any] = {
        "dtypes": ("float32",),
        "why_not": why_not,
        "disabled_by": "no-jit",
        "is_recordable": True,
    }
    return Kernel(f"numba.{operation}", operation, "numpy", forward, vjp, **(defaults | options))


def flatten(x: Any, dtype: Any = None) -> Any:
    """Return all elements in C order as a vector; a view if possible."""
    return contiguous(x, dtype).reshape(-1)
