"""Linear maps by cuBLASLt, which handles the bias in the same pass: it adds it and applies ReLU, or sums its gradient.

CuPy does not bind cuBLASLt but loads it with cuBLAS, so its functions are called through ctypes with CuPy's handle.
The plan of each shape (descriptors and the first algorithm of its heuristic) is cached per thread. For large gradients
of weights, the fastest of the first algorithms and of cuBLAS with a pass for the bias is measured once. A shape that
cuBLASLt does not support causes one warning, and callers fall back to cuBLAS; other errors are raised.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

from xformer.backends import NativeArray as Array
from xformer.backends import dtype_name
from xformer.kernels.cupy import cublas, launch
from xformer.kernels.cupy.calls import enqueue
from xformer.kernels.cupy.launch import Failures, Plans, contiguous, cuda, empty
from xformer.native import is_reproducible
from xformer.ops.checks import CacheFile
from xformer.threads import fork_safe_lock

_MAX_WORKSPACE = 32 << 20  # bytes, as cuBLAS uses on Hopper
# cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t, cublasLtEpilogue_t
_TRANSPOSED, _EPILOGUE, _BIAS = (3, 4), 7, 8
_WORKSPACE, _REDUCTION, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_ADD_BIAS, _ADD_BIAS_AND_RELU, _SUM_FIRST = 4, 6, 256  # BIAS, RELU_BIAS, BGRADA
_ALIGNED_TO = 256, 16, 2  # bytes: CuPy's pool, vector loads, the smallest element
_MEASURED, _MIN_OPERATIONS = 8, 2**31  # algorithms, and multiplications from which the fastest is measured
_COMPUTE_TYPE_REDUCTION = 2  # sums of several blocks are added in the compute type, not that of the output
_SIGNATURES = {
    "cublasLtMatmulDescCreate": (c_void_p, c_int, c_int),
    "cublasLtMatmulDescSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (c_void_p, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (c_void_p,),
    "cublasLtMatmulPreferenceSetAttribute": (c_void_p, c_int, c_void_p, c_size_t),
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*[c_void_p] * 7, c_int, c_void_p, c_void_p),
    "cublasLtMatmul": (*[c_void_p] * 14, c_size_t, c_void_p),
}


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("_rest", c_int * 5))


class Spec(NamedTuple):
    """A product, (n, m) = (n, k) (k, m) in column-major order; its plan also depends on device and alignment.

    data_type: cudaDataType; transposed, leading: of the first and the second matrix; epilogue: what the bias is for.
    """

    data_type: int
    compute: int
    n: int
    m: int
    k: int
    transposed: tuple[int, int]
    leading: tuple[int, int]
    epilogue: int


_plans, _failures = Plans(512), Failures()
_ONE_AND_ZERO = (ctypes.c_float * 2)(1.0, 0.0)


@functools.cache
def library() -> Any:
    """Return cuBLASLt, or None if CuPy has not loaded it with cuBLAS."""
    cublas.binding_and_handle()  # loads it
    loaded = cublas.loaded("cublasLt")
    return None if loaded is None else declare(loaded)


def declare(library: Any) -> Any:
    """Declare the argument types of the functions of cuBLASLt."""
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    library.cublasLtGetVersion.restype = c_size_t
    return library


def affine(rows: Array, weight: Array, bias: Array, *, relu: bool = False) -> Array | None:
    """Compute rows @ weight + bias, and ReLU of it if `relu`.

    Args:
        rows: Array of shape (m, k).
        weight: Array of shape (k, n) and the same dtype.
        bias: Array of shape (n,) and the same dtype.
        relu: Whether to apply ReLU, which here may turn NaN into 0. The loss is still NaN, because the residual
            connection around a feed-forward network passes the NaN of its input.

    Returns:
        C-contiguous array of shape (m, n), accumulated in float32, or None if cuBLASLt does not support the product.
    """
    return _product(rows, weight, contiguous(bias), _ADD_BIAS_AND_RELU if relu else _ADD_BIAS)


def gradients(rows: Array, g_rows: Array, separately: Callable[[], tuple[Array, Array]]) -> tuple[Array, Array]:
    """Compute the gradients of weight and bias of an affine map.

    Args:
        rows: Array of shape (m, k).
        g_rows: Gradient of the output, (m, n), of the same dtype.
        separately: Computes both in another way, if cuBLASLt does not support the product, or is slower.

    Returns:
        rows.T @ g_rows and the sum of g_rows over its rows, accumulated in float32.
    """
    g_rows = contiguous(g_rows)  # BGRADA takes no transposed matrix
    bias = empty(g_rows, g_rows.shape[1:])
    weight = _product(rows.T, g_rows, bias, _SUM_FIRST, separately)
    return separately() if weight is None else (weight, bias)


def _product(
    a: Array, b: Array, bias: Array, epilogue: int, separately: Callable[[], Any] | None = None
) -> Array | None:
    """Compute a @ b, (m, k) by (k, n), with an epilogue that reads or writes the bias, (n,).

    Return None if that is unsupported, or if `separately`, which computes the same, is faster.
    """
    (m, k), n, data_type = a.shape, b.shape[1], cublas.data_type(a.dtype)
    if dtype_name(a.dtype) == "float64" or 0 in (m, k, n) or is_reproducible() or library() is None:
        return None
    first, second = cublas.operand(b), cublas.operand(a)
    transposed, leading = (first.transposed, second.transposed), (first.leading, second.leading)
    spec = Spec(data_type, cublas.compute_type(data_type), n, m, k, transposed, leading, epilogue)
    device, _ = launch.current()
    arrays = first.array, second.array, (out := empty(a, (m, n))), bias
    addresses = map(cublas.pointer, arrays)
    alignments = tuple(next(size for size in _ALIGNED_TO if address % size == 0) for address in addresses)
    is_aligned = min(alignments) >= 16
    if _failures and (spec, is_aligned, device) in _failures:
        return None
    try:
        plan: _Plan = _plans.find((spec, alignments, device), functools.partial(_Plan, spec, alignments))
        if separately is not None and not plan.is_chosen:
            plan.choose(arrays, separately)
        if plan.best is None:
            return None
        enqueue(plan.run, (plan.best,), arrays)
    except cublas.CublasError as error:
        if not error.is_unsupported:
            raise
        shapes = f"({m}, {k}) by ({k}, {n}), {dtype_name(a.dtype)}"
        warning = f"cuBLASLt failed for {shapes}; the bias takes another pass over memory: {launch.one_line(error)}"
        # It has no kernels for some products of float32 whose addresses are not multiples of 16 bytes.
        _failures.add((spec, is_aligned, device), str(error), warning if is_aligned else None)
        return None
    return out


class _Plan:
    """Descriptors and algorithm of a product, for the alignments of both matrices, output and bias."""

    def __init__(self, spec: Spec, alignments: tuple[int, ...]) -> None:
        self._descriptors: list[tuple[str, c_void_p]] = []
        self._handle = cublas.binding_and_handle()[1]  # valid for cuBLASLt, too; of this thread and device
        weakref.finalize(self, _destroy, library(), self._descriptors).atexit = False
        self._operation = self._create("MatmulDesc", spec.compute, 0)  # scalars are float32
        self._bias = alignments[3]  # an address with the same alignment, until a bias is given
        for attribute, value in zip((*_TRANSPOSED, _EPILOGUE), (*spec.transposed, spec.epilogue), strict=True):
            self._set("MatmulDesc", self._operation, attribute, c_int(value))
        self._set("MatmulDesc", self._operation, _BIAS, c_uint64(self._bias))
        shapes = (spec.n, spec.k), (spec.k, spec.m), (spec.n, spec.m)
        layouts = (*zip(spec.transposed, spec.leading, strict=True), (0, spec.n))
        self._layouts = [
            self._create("MatrixLayout", spec.data_type, *(reversed(shape) if transposed else shape), leading)
            for shape, (transposed, leading) in zip(shapes, layouts, strict=True)
        ]
        self._key = spec, alignments
        self.is_chosen = spec.epilogue != _SUM_FIRST or spec.n * spec.m * spec.k < _MIN_OPERATIONS
        self._algorithms = self._find_algorithms(alignments, 1 if self.is_chosen else _MEASURED)
        self.best: _Heuristic | None = self._algorithms[0]

    def _find_algorithms(self, alignments: tuple[int, ...], most: int) -> list[_Heuristic]:
        preference = self._create("MatmulPreference")
        self._set("MatmulPreference", preference, _WORKSPACE, c_uint64(_MAX_WORKSPACE))
        self._set("MatmulPreference", preference, _REDUCTION, c_int(_COMPUTE_TYPE_REDUCTION))
        for attribute, size in zip(_ALIGNMENTS, (*alignments[:3], alignments[2]), strict=True):
            self._set("MatmulPreference", preference, attribute, c_int(size))
        found, count = (_Heuristic * most)(), c_int()
        arguments = self._handle, self._operation, *self._layouts, self._layouts[2], preference
        _check("MatmulAlgoGetHeuristic", *arguments, most, ctypes.byref(found), ctypes.byref(count))
        if count.value < 1 or found[0].state:
            raise cublas.CublasError("cublasLtMatmulAlgoGetHeuristic", found[0].state or cublas.NOT_SUPPORTED)
        return [each for each in found[: count.value] if not each.state]

    def choose(self, arrays: tuple[Array, ...], separately: Callable[[], Any]) -> None:
        """Let `best` be the fastest algorithm, or None if `separately` is; not while a graph captures the stream."""
        ways = [functools.partial(self.run, each, arrays) for each in self._algorithms]
        device, _ = launch.device_properties(launch.current()[0])
        identity, (spec, alignments) = f"{device}, cuBLASLt {library().cublasLtGetVersion()}", self._key
        place = fastest(identity, f"{(*spec, *alignments)}", [*ways, separately])
        self.is_chosen = place is not None
        self.best = (*self._algorithms, None)[place or 0]

    def run(self, algorithm: _Heuristic, arrays: tuple[Array, ...]) -> None:
        """Enqueue the product, given both matrices, output and bias."""
        first, second, out, bias = map(cublas.pointer, arrays)
        if bias != self._bias:
            self._set("MatmulDesc", self._operation, _BIAS, c_uint64(bias))
            self._bias = bias
        first_layout, second_layout, out_layout = self._layouts
        size = algorithm.workspace
        space = launch.workspace(size) if size else None  # alive until the product is enqueued
        one = ctypes.addressof(_ONE_AND_ZERO)
        _check(
            "Matmul",
            *(self._handle, self._operation, one, first, first_layout, second, second_layout),
            *(one + 4, out, out_layout, out, out_layout, ctypes.addressof(algorithm)),
            *(None if space is None else cublas.pointer(space), size, launch.current()[1]),
        )

    def _create(self, descriptor_type: str, *arguments: Any) -> c_void_p:
        descriptor = c_void_p()
        _check(f"{descriptor_type}Create", ctypes.byref(descriptor), *arguments)
        self._descriptors.append((descriptor_type, descriptor))
        return descriptor

    def _set(self, descriptor_type: str, descriptor: c_void_p, attribute: int, value: Any) -> None:
        _check(f"{descriptor_type}SetAttribute", descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value))


def _check(function: str, *arguments: Any) -> None:
    status = getattr(library(), f"cublasLt{function}")(*arguments)
    if status:
        raise cublas.CublasError(f"cublasLt{function}", status)


def _destroy(library: Any, descriptors: list[tuple[str, c_void_p]]) -> None:
    for descriptor_type, descriptor in descriptors:
        getattr(library, f"cublasLt{descriptor_type}Destroy")(descriptor)


# --- The fastest of several ways, measured once for a shape and a device and kept in a file ---------------------------

_RESULTS, _LOCK = CacheFile("fastest_products.json"), fork_safe_lock()
_BEFORE, _REPETITIONS = 4, 2  # calls that keep the GPU busy while the host enqueues the one that is measured
_MIN_GAIN = 0.97  # relative time from which another way than the first is worth while


def fastest(identity: str, key: str, ways: Sequence[Callable[[], Any]]) -> int | None:
    """Return the number of the fastest of functions that enqueue work, or None while a graph captures the stream.

    Args:
        identity: What the times depend on, besides the key: a device and versions.
        key: What is computed.
        ways: The functions. The first one is returned unless another is clearly faster.
    """
    with _LOCK:  # all threads take the same
        known = _RESULTS.get(identity, key)
        if type(known) is int and 0 <= known < len(ways):
            return known
        if cuda().get_current_stream().is_capturing():
            return None
        times = [_milliseconds(way) for way in ways]
        times[0] *= _MIN_GAIN
        best = times.index(min(times))
        _RESULTS.set(identity, key, best)
        return best


def _milliseconds(way: Callable[[], Any]) -> float:
    """Return the time of a function on the GPU; infinity if it fails."""
    stream, times = cuda().get_current_stream(), []
    try:
        for _ in range(_REPETITIONS):
            for _ in range(_BEFORE):
                way()
            start, end = cuda().Event(), cuda().Event()
            start.record(stream)
            way()
            end.record(stream)
            end.synchronize()
            times.append(cuda().get_elapsed_time(start, end))
    except (RuntimeError, MemoryError):
        return math.inf
    return float(min(times))
