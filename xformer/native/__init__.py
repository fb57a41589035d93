"""The native library: compiled kernels for arrays of NumPy, and programs of their calls. It is optional.

`call("relu", (x, y))` runs one operation on arrays of NumPy. The C++ code reads shapes and pointers from the array
objects, as asking Python for the pointers of a call would take longer than many calls; `_load` compares what it reads
with what NumPy says, and the library is not used if they differ.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np

from xformer.backends import array_namespace
from xformer.backends.library import Library, on_load
from xformer.backends.portable import tensordot
from xformer.environment import clear_cache, env_flag, env_value, on_clear
from xformer.errors import ConfigError, ShapeError
from xformer.threads import IS_WORKER, num_threads, register_blas

__all__ = [
    "CACHE_LINE", "WHY_NOT", "Program", "aligned_empty", "array_namespace", "call", "can_copy", "contiguous",
    "has_fused_products", "is_available", "is_reproducible", "level", "record", "release_memory",
    "use_reproducible_algorithms", "use_reproducible_on", "zeros",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)


LIBRARY = Path(env_value("XFORMER_NATIVE_LIBRARY") or Path(__file__).with_name("libxformer.so"))
_INVALID = "XFORMER_NATIVE is"
_LEVELS = ("auto", "off", "baseline", "avx2", "avx512")
_OTHER, _BOOL, _INT8, _UINT8, _INT32, _INT64, _BFLOAT16, _FLOAT32, _FLOAT64 = range(9)
# Bits of bfloat16 are passed as uint16.
_TYPES = {"bool": _BOOL, "int8": _INT8, "uint8": _UINT8, "int32": _INT32, "int64": _INT64, "uint16": _BFLOAT16}
_TYPES |= {"float32": _FLOAT32, "float64": _FLOAT64}
CASTABLE = frozenset(np.dtype(name) for name in _TYPES if name != "uint16")
MAX_DIMS = 6
CACHE_LINE = 64  # bytes
_ARGUMENTS: list[Any] = [ctypes.c_int, ctypes.py_object, *[ctypes.c_int64] * 4, *[ctypes.c_double] * 4]
_INDEX_ERROR = b"an index is out of range"


class _Layout(ctypes.Structure):
    _fields_ = (
        ("head", ctypes.c_int64),
        ("tuple_items", ctypes.c_int64),
        ("none", ctypes.c_void_p),
        ("array_type", ctypes.c_void_p),
        ("types", ctypes.c_int32 * 32),
    )


def _load() -> tuple[Any, str]:
    """Return the library, or None and the reason."""
    wanted = env_value("XFORMER_NATIVE", "auto")
    if wanted not in _LEVELS:
        return None, f"{_INVALID} {wanted!r}; expected {', '.join(map(repr, _LEVELS))}"
    if wanted == "off":
        return None, "XFORMER_NATIVE=off"
    if sys.implementation.name != "cpython" or sys.platform == "win32":
        return None, "it needs CPython on Linux or macOS"
    if not LIBRARY.exists():
        return None, "it was not compiled: with a C++ compiler, run python -m xformer.native.build"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        for name in ("xf_open", "xf_level", "xf_name", "xf_describe", "xf_call", "xf_append", "xf_run"):
            getattr(library, name).restype = ctypes.c_char_p
        library.xf_set_reproducible.restype = None
    except OSError as error:
        return None, str(error)
    except AttributeError:
        return None, "it was compiled from older sources: run python -m xformer.native.build"
    library.xf_open.argtypes = [ctypes.POINTER(_Layout), ctypes.c_char_p]
    library.xf_describe.argtypes = [ctypes.py_object, ctypes.POINTER(ctypes.c_int64)]
    library.xf_call.argtypes = [*_ARGUMENTS, ctypes.c_int]
    library.xf_program.restype = ctypes.c_void_p
    library.xf_append.argtypes = [ctypes.c_void_p, *_ARGUMENTS]
    library.xf_close.argtypes, library.xf_close.restype = [ctypes.c_void_p], ctypes.c_int64
    library.xf_run.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    library.xf_free.argtypes, library.xf_free.restype = [ctypes.c_void_p], None
    library.xf_set_blas.argtypes, library.xf_set_blas.restype = [ctypes.c_void_p] * 3, None
    layout = _Layout(object.__basicsize__, tuple.__basicsize__, id(None), id(np.ndarray))
    for name, number in _TYPES.items():
        layout.types[np.dtype(name).num] = number
    level = "" if wanted == "auto" else wanted
    if reason := library.xf_open(ctypes.byref(layout), level.encode()):
        return None, reason.decode()
    if not _reads_arrays(library):
        return None, "it cannot read the arrays of this version of Python or NumPy"
    return library, ""


def _reads_arrays(library: Any) -> bool:
    """Compare what the library reads from arrays with what NumPy says."""
    whole = np.empty((4, 6, 5), np.float32)
    for x in (whole, whole[1:, ::2].transpose(2, 0, 1), np.empty((2, 0), np.int64), np.empty((), np.bool_)):
        result = (ctypes.c_int64 * 20)()
        if library.xf_describe((x, None), result):
            return False
        expected = [2, x.ctypes.data, _TYPES[x.dtype.name], x.ndim, *x.shape, *x.strides]
        if result[: len(expected)] != expected:
            return False
    return True


def _use_blas(library: Any) -> None:
    """Let the native library call NumPy's own BLAS library, if there is one."""
    folders = (
        os.path.join(os.path.dirname(np.__file__), *parts) for parts in ((os.pardir, "numpy.libs"), (".dylibs",))
    )
    for path in (path for folder in folders for path in glob.glob(os.path.join(folder, "*openblas64*"))):
        try:
            blas = ctypes.CDLL(path)
            functions = [
                getattr(blas, f"scipy_{name}64_")
                for name in ("cblas_sgemm", "openblas_get_num_threads", "openblas_set_num_threads")
            ]
        except (OSError, AttributeError):
            continue
        library.xf_set_blas(*(ctypes.cast(function, ctypes.c_void_p) for function in functions))
        register_blas(path, library.xf_blas_threads, library.xf_set_blas_threads)
        return


def is_reproducible() -> bool:
    """Return whether `use_reproducible_algorithms` was called, or XFORMER_REPRODUCIBLE is 1."""
    return env_flag("XFORMER_REPRODUCIBLE", default=not env_flag("XFORMER_BLAS", default=True))  # its former name


LIB, WHY_NOT = _load()
OPERATIONS: dict[str, int] = {}
_OUTPUTS: dict[str, int] = {}  # bit i is set if array i is written


def _set_reproducible() -> None:
    with contextlib.suppress(ConfigError):  # which `is_available` reports
        LIB.xf_set_reproducible(is_reproducible())


if LIB is not None:
    _use_blas(LIB)
    _set_reproducible()
    on_clear(_set_reproducible)
    while _name := LIB.xf_name(len(OPERATIONS)):
        _OUTPUTS[_name.decode()] = LIB.xf_outputs(len(OPERATIONS))
        OPERATIONS[_name.decode()] = len(OPERATIONS)


def is_available() -> bool:
    """Return whether the library was compiled and runs on this machine.

    Raises:
        ConfigError: If XFORMER_NATIVE has an invalid value. The import of xformer does not raise, so that the command
            line can report it.
    """
    if WHY_NOT.startswith(_INVALID):
        raise ConfigError(WHY_NOT)
    if is_reproducible():
        require_fused_products()
    return not WHY_NOT


def level() -> str:
    """Return the instruction set of the library: "avx512", "avx2" or "baseline"; "" without the library."""
    return LIB.xf_level().decode() if LIB is not None else ""


def has_fused_products() -> bool:
    """Return whether the library rounds a product and a sum once, which reproducible results need."""
    return level() in ("avx2", "avx512") or (level() == "baseline" and os.uname().machine in ("aarch64", "arm64"))


def require_fused_products() -> None:
    """Raise ConfigError unless the library computes, and has fused products."""
    off = {"portable", "no-native"} & {*env_value("XFORMER_KERNELS").split(",")}
    if off or not has_fused_products():
        found = f"XFORMER_KERNELS is {off.pop()}" if off else WHY_NOT or f"it runs at level {level()!r}"
        name = " (XFORMER_BLAS=0)" if env_value("XFORMER_BLAS") == "0" else ""
        raise ConfigError(f"reproducible results{name} need the native library with AVX2, AVX-512 or NEON, but {found}")


def call(
    name: str, arrays: tuple[Any, ...],
    i0: int = 0, i1: int = 0, i2: int = 0, i3: int = 0,
    n0: float = 0.0, n1: float = 0.0, n2: float = 0.0, n3: float = 0.0,
) -> None:  # fmt: skip
    """Run an operation, which writes into its output arrays; inputs that must be contiguous are copied if necessary.

    Args:
        name: Name of the operation.
        arrays: Its inputs and outputs, arrays of NumPy, None for absent ones; see the C++ sources.
        i0: First of its integers.
        i1: Second of its integers.
        i2: Third of its integers.
        i3: Fourth of its integers.
        n0: First of its floating-point numbers.
        n1: Second of its floating-point numbers.
        n2: Third of its floating-point numbers.
        n3: Fourth of its floating-point numbers.

    Raises:
        IndexError: If an index is out of range.
        ShapeError: If an array does not fit.
    """
    threads = 1 if IS_WORKER.get() else num_threads()
    error = LIB.xf_call(OPERATIONS[name], arrays, i0, i1, i2, i3, n0, n1, n2, n3, threads)
    if error is not None:  # some operations take contiguous inputs only
        written = _OUTPUTS[name]
        copied = (type(x) is np.ndarray and not written >> i & 1 for i, x in enumerate(arrays))
        arrays = tuple([contiguous(x) if is_input else x for x, is_input in zip(arrays, copied, strict=True)])
        error = LIB.xf_call(OPERATIONS[name], arrays, i0, i1, i2, i3, n0, n1, n2, n3, threads)
        if error is not None:
            raise_error(name, error)
    if _recorders and (recorder := _recorders.get(threading.get_ident())) is not None:
        outputs = tuple(array for i, array in enumerate(arrays) if _OUTPUTS[name] >> i & 1 and array is not None)
        recorder(name, arrays, (i0, i1, i2, i3, n0, n1, n2, n3), outputs)


Recorder = Callable[[str, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]], None]
_recorders: dict[int, Recorder | None] = {}  # by thread


@contextlib.contextmanager
def record(recorder: Recorder | None) -> Iterator[None]:
    """Call `recorder(name, arrays, numbers, outputs)` after each `call` of this thread inside the block.

    Args:
        recorder: The function; None ends the recording of an enclosing block until this one ends.
    """
    thread = threading.get_ident()
    before = _recorders.get(thread)
    _recorders[thread] = recorder
    try:
        yield
    finally:
        if before is None:
            del _recorders[thread]
        else:
            _recorders[thread] = before


class Program:
    """Operations on fixed arrays, executed by one call of the library.

    Args:
        calls: Names of operations, each with a tuple of arrays and the numbers, as for `call`.
    """

    def __init__(self, calls: Iterable[tuple[Any, ...]]) -> None:
        self._handle = LIB.xf_program()
        self._arrays = []  # keeps the memory alive
        for name, arrays, *numbers in calls:
            error = LIB.xf_append(self._handle, OPERATIONS[name], arrays, *numbers)
            if error is not None:
                raise_error(name, error)
            self._arrays.append(arrays)
        LIB.xf_close(self._handle)

    def __call__(self, count: int = 1) -> None:
        """Run the operations.

        Args:
            count: How many times, one after the other.

        Raises:
            IndexError: If an index is out of range.
        """
        error = LIB.xf_run(self._handle, 1 if IS_WORKER.get() else num_threads(), count)
        if error is not None:
            raise_error("the program", error)

    def __del__(self) -> None:
        LIB.xf_free(self._handle)


def can_copy(x: Any, dtype: Any) -> bool:
    """Return whether the library can copy an array of NumPy into one of a dtype.

    Args:
        x: Array.
        dtype: Dtype of the copy.
    """
    is_known = x.dtype in CASTABLE and dtype in CASTABLE
    return is_known and type(x) is np.ndarray and x.ndim <= MAX_DIMS and x.flags.aligned and not WHY_NOT


def contiguous(x: Any, dtype: Any = None) -> Any:
    """Return an array as a C-contiguous one of a dtype: itself, or a copy.

    Args:
        x: Array of NumPy.
        dtype: Its dtype; default that of `x`.
    """
    dtype = x.dtype if dtype is None else np.dtype(dtype)
    if x.flags.c_contiguous and x.dtype == dtype:
        return x
    if not can_copy(x, dtype):
        return np.ascontiguousarray(x, dtype) if x.ndim else np.asarray(x, dtype)
    copy = np.empty(x.shape, dtype)
    call("copy", (x, copy))
    return copy


def aligned_empty(shape: Any, dtype: Any) -> Any:
    """Return an uninitialized array that begins at a cache line, so that no vector lies in two of them.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + CACHE_LINE, np.uint8)
    return memory[-memory.ctypes.data % CACHE_LINE :][:size].view(dtype).reshape(shape)


def release_memory() -> None:
    """Return free memory to the system, which glibc keeps otherwise."""
    with contextlib.suppress(AttributeError, TypeError):  # another C library, or Windows
        ctypes.CDLL(None).malloc_trim(0)


def zeros(shape: Any, dtype: Any) -> Any:
    """Return an array of zeros.

    Args:
        shape: Its shape.
        dtype: Its dtype.
    """
    array = np.empty(shape, dtype)
    if can_copy(array, array.dtype):
        call("fill", (array,))
    else:
        array.fill(0)
    return array


def raise_error(name: str, error: bytes) -> None:
    """Raise the exception for an error message of the library."""
    raise (IndexError if error == _INDEX_ERROR else ShapeError)(f"{name}: {error.decode()}")


# --- The mode in which results have the same bits for any batch, number of threads and processor ----------------------


def use_reproducible_algorithms(mode: bool = True) -> None:
    """Let float32 results on NumPy depend on the mathematical problem alone, at the cost of some speed.

    Then every sum has one order: results have the same bits for any batch, padding and step of decoding, in training
    and in decoding, for any number of threads, with AVX2 and AVX-512, and with any BLAS library or none. Call it before
    anything else; processes that this one starts inherit the mode. On CuPy, only the rows of a batch and those rows
    alone have the same bits. See the page on reproducible results.

    Args:
        mode: Whether to use them; False restores the default.

    Raises:
        ConfigError: If the native library is absent, or this processor has no fused products.
    """
    from xformer.config import check_bool  # array libraries need no configurations

    if check_bool("mode", mode):
        require_fused_products()
    os.environ["XFORMER_REPRODUCIBLE"] = str(int(mode))
    clear_cache()


def use_reproducible_on(*names: str | None) -> None:
    """Use reproducible algorithms; raise ConfigError for other libraries than NumPy and CuPy, or dtypes than float32.

    Args:
        *names: Names of array libraries and dtypes; None for an unknown one.
    """
    for name in names:
        if name not in ("numpy", "cupy", "float32", None):
            raise ConfigError(f"reproducible results need float32 on NumPy or CuPy; received {name}")
    use_reproducible_algorithms()


def matmul(x1: Any, x2: Any, /) -> Any:
    """Multiply matrices by `np.matmul`, whose BLAS chooses the order of sums, or if required in the reproducible order.

    Args:
        x1: Array of shape (..., rows, depth), or (depth,).
        x2: Array of shape (..., depth, columns), or (depth,).
    """
    if not is_reproducible() or 0 in (x1.ndim, x2.ndim) or np.result_type(x1, x2) != np.float32:
        return np.matmul(x1, x2)
    if x2.ndim == 1:
        return matmul(x1, x2[:, None])[..., 0][()]
    if x1.ndim == 1:
        return matmul(x1[None, :], x2)[..., 0, :]
    x1, x2 = np.asarray(x1, np.float32), np.asarray(x2, np.float32)  # arrays of no subclass, in native byte order
    if max(x1.ndim, x2.ndim) > MAX_DIMS:
        return np.vectorize(matmul, "f", signature="(n,k),(k,m)->(n,m)")(x1, x2)
    out = np.empty((*np.broadcast_shapes(x1.shape[:-2], x2.shape[:-2]), x1.shape[-2], x2.shape[-1]), np.float32)
    with record(None):  # a program records the whole function
        call("matmul", (x1, x2, out))
    return out


def _vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    rows, columns = (np.moveaxis(x, axis, -1) for x in (x1, x2))
    return matmul(rows.conj()[..., None, :], columns[..., None])[..., 0, 0][()]


def _replace_products(library: Library) -> None:
    if library.name == "numpy":
        products = {"matmul": matmul, "tensordot": MethodType(tensordot, library), "vecdot": _vecdot}
        linalg = ModuleType("numpy.linalg")
        vars(linalg).update(vars(library.linalg) | products)
        vars(library).update(products, operator_matmul=matmul, linalg=linalg)


on_load(_replace_products)
