"""Launches of the CUDA sources in `cuda/`, which are compiled when they are first needed, and plans of CUDA libraries.

Everything else in the CuPy kernels is Python code on arrays. To run it on other arrays, as the tests do on the CPU,
replace `launch`, `is_current_device` and `cublas.pointer`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import math
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

from xformer.backends import accumulation_dtype, array_namespace, dtype_name, is_half_precision, resolve
from xformer.kernels.cupy.calls import allocated, enqueue

FLOATS = ("float16", "bfloat16", "float32", "float64")
_SOURCES = Path(__file__).parent / "cuda"
OPTIONS = ("--std=c++17",)


def source(name: str) -> str:
    """Return the text of a source with the common part, which needs no header."""
    return "\n".join((_SOURCES / f"{part}.cu").read_text(encoding="utf-8") for part in ("common", name))


def launch(kernel: str, dtypes: tuple[str, ...], blocks: int, threads: int, *arguments: Any) -> None:
    """Enqueue a kernel on the current stream, unless there are no blocks.

    Args:
        kernel: Source and function template, as in "norms.normalize".
        dtypes: Template arguments: names of dtypes, and numbers in digits.
        blocks: Number of blocks.
        threads: Threads per block, a multiple of 32.
        *arguments: Arrays are passed as pointers, None as a null pointer, int as long long, float as double, and NumPy
            arrays of one element by value.

    Raises:
        BackendError: If CuPy is not installed.
    """
    if blocks:
        enqueue(
            _compiled(kernel, dtypes), ((blocks,), (threads,)), tuple([x if x is not None else 0 for x in arguments])
        )


def is_current_device(array: Any) -> bool:
    """Return whether an array is on the current device, on which launches run."""
    return array.data.device_id == cuda().runtime.getDevice()


@functools.cache
def cuda() -> Any:
    """Return the module cupy.cuda."""
    return importlib.import_module("cupy").cuda


def identity() -> str:
    """Return the current GPU, the versions of driver and libraries, and a hash of the sources of all operations."""
    return _identity(cuda().runtime.getDevice())


@functools.cache
def _identity(device: int) -> str:
    runtime, operations = cuda().runtime, _SOURCES.parents[1]
    paths = [*operations.rglob("*.cu"), *operations.rglob("*.py")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()[:16]
    numbers = [
        runtime.getDeviceProperties(device)["name"].decode(),
        f"driver {runtime.driverGetVersion()}",
        f"runtime {runtime.runtimeGetVersion()}",
        f"cupy {importlib.import_module('cupy').__version__}",
    ]
    for name in ("nvidia-cublas", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-frontend"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            numbers.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join([*numbers, f"kernels {digest}"])


@functools.cache
def _compiled(kernel: str, dtypes: tuple[str, ...]) -> Any:
    """Compile an instance of a template; CuPy caches it in memory, per device, and on disk."""
    file, _, function = kernel.partition(".")
    expression = instance(function, dtypes)
    module = resolve("cupy").RawModule(code=source(file), options=OPTIONS, name_expressions=(expression,))
    return module.get_function(expression)


def instance(function: str, dtypes: tuple[str, ...]) -> str:
    """Return the C++ name of an instance of a function template."""
    return f"{function}<{', '.join(dtypes)}>"


# --- Arrays ---


def why_not(x: Any, *arrays: Any, **options: Any) -> str | None:
    """Return why kernels do not take arrays on the device of x, or None."""
    return None if is_current_device(x) else f"arrays are on {x.device}, which is not the current device"


def is_compatible_dtype(parameter: Any, x: Any) -> bool:
    """Return whether a parameter has the dtype of x, or float32 if x has 16 bits."""
    dtype, x_dtype = dtype_name(parameter.dtype), dtype_name(x.dtype)
    return dtype == x_dtype or (dtype == "float32" and is_half_precision(x.dtype))


def dtype_names(*arrays: Any) -> tuple[str, ...]:
    """Return the names of the dtypes, which are template arguments of a launch."""
    return tuple(dtype_name(array.dtype) for array in arrays)


def compute_dtype(x: Any) -> Any:
    """Return the dtype in which kernels compute: float64 for float64, else float32."""
    return accumulation_dtype(array_namespace(x), x.dtype)


def contiguous(x: Any, dtype: Any = None) -> Any:
    """Return x in C order, and in `dtype` if given; x itself if possible."""
    if dtype is not None and x.dtype != dtype:
        x = array_namespace(x).astype(x, dtype)
    return x if x.flags.c_contiguous else array_namespace(x).ascontiguousarray(x)


def empty(like: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    """Allocate an array in C order, by default of the shape and dtype of `like`."""
    xp = array_namespace(like)
    return allocated(xp.empty(like.shape if shape is None else shape, dtype=like.dtype if dtype is None else dtype))


def row_count(x: Any) -> int:
    """Return the number of rows along the last axis."""
    return math.prod(x.shape[:-1])


# --- Grids, which depend only on shapes and dtypes: the same arrays give the same bits on every device ---

_VECTOR_BYTES = 16
_MAX_BLOCKS = 2**20  # kernels loop over further work
MAX_THREADS = 512  # of a block with one row
_MAX_SMALL_BLOCKS = 2**14  # of threads that load little at a time: starting them takes as long as a load
_SHARING_THREADS = 128  # per block with several rows


def elements_per_thread(x: Any) -> int:
    """Return the number of elements that a thread loads at a time."""
    return _VECTOR_BYTES // x.itemsize


def grid_for_rows(rows: int, x: Any, vectors: int = 1) -> tuple[int, int]:
    """Return the blocks, and threads per block, of a kernel with one block per row of x.

    Each thread loads `vectors` times, or more often from rows that are longer than a block of MAX_THREADS can load.
    """
    return min(rows, _MAX_BLOCKS), min(MAX_THREADS, -(-_loads(x) // (32 * vectors)) * 32)


def grid_for_shared_rows(rows: int, x: Any, vectors: int, min_threads: int = 1) -> tuple[int, int, int]:
    """Return the blocks, threads per block, and threads per row of a kernel with several short rows per block.

    A short row has at most a warp, of which each thread loads `vectors` times; others are as `grid_for_rows` has them.
    """
    if _loads(x) > 32 * vectors:
        blocks, threads = grid_for_rows(rows, x, vectors)
        return blocks, threads, threads
    row_threads = max(min_threads, min(32, 1 << (_loads(x) - 1).bit_length()))
    return min(-(-rows * row_threads // _SHARING_THREADS), _MAX_SMALL_BLOCKS), _SHARING_THREADS, row_threads


def vectors_per_thread(x: Any, most: int) -> int:
    """Return how often a thread of a kernel that shares blocks loads: once if a warp can load a row, else `most`."""
    return 1 if _loads(x) <= 32 else most


def _loads(x: Any) -> int:
    """Return the number of loads of a row."""
    return max(1, -(-x.shape[-1] // elements_per_thread(x)))


def grid_for_elements(x: Any) -> tuple[int, int]:
    """Return the blocks, and threads per block, of an elementwise kernel."""
    return min(_MAX_SMALL_BLOCKS, -(-x.size // (256 * elements_per_thread(x)))), 256


# --- Plans of cuBLASLt and cuDNN, and the reasons why some cannot be built --------------------------------------------
#
# A plan is what a library prepares for one shape; building it takes longer than running it.

_MAX_FAILURES = 1024


def current() -> tuple[int, int]:
    """Return the current device and the address of its current stream."""
    return cuda().runtime.getDevice(), cuda().get_current_stream().ptr


@functools.cache
def device_properties(device: int) -> tuple[str, int]:
    """Return the name of a device and its compute capability, 90 for 9.0."""
    properties = cuda().runtime.getDeviceProperties(device)
    return properties["name"].decode(), 10 * properties["major"] + properties["minor"]


def workspace(size: int) -> Any:
    """Allocate bytes from CuPy's pool, which reuses them only for later work on the same stream."""
    cupy = importlib.import_module("cupy")
    return cupy.empty(max(size, 1), dtype=cupy.uint8)


class Plans(threading.local):
    """The most recently used plans, per thread, because threads must not share handles of these libraries."""

    def __init__(self, max_plans: int) -> None:
        self.max_plans = max_plans
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the plan of a key, from the cache or from `make`."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make()
            if len(self._plans) > self.max_plans:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def __iter__(self) -> Any:
        return iter(self._plans)


class Failures(dict[Hashable, str]):
    """The reasons why the plans of some keys cannot be built."""

    def add(self, key: Hashable, reason: str, warning: str | None) -> None:
        """Store a reason, and give the warning, if any, if the key is new."""
        if key in self:
            return
        while len(self) >= _MAX_FAILURES:
            self.pop(next(iter(self)), None)
        self[key] = reason
        if warning is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=3)


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
