"""Linear maps by cuBLASLt: a bias and ReLU cost no pass over memory, since each sum gets them before it is written.

CuPy binds cuBLAS and not cuBLASLt, which comes and is loaded with it, so its functions are called as C has them, with
CuPy's handle. What it is asked once for every shape (descriptors, and the algorithm that its heuristic puts first) is
kept, one set a thread; what it does not take is remembered and warned about once, and callers do without.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from ctypes import c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any, NamedTuple

from xformer.backends import Array, array_namespace, dtype_name
from xformer.kernels.cupy import cublas as cupy_products
from xformer.kernels.cupy import plans as cupy_plans
from xformer.kernels.cupy.plans import Failures, Plans
from xformer.kernels.cupy.support import contiguous

_MOST_WORKSPACE = 32 << 20  # bytes, as much as cuBLAS takes on Hopper
# cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t, cublasLtEpilogue_t
_TRANSPOSED, _EPILOGUE, _BIAS = (3, 4), 7, 8
_WORKSPACE, _REDUCTION, _ALIGNMENTS = 1, 3, (5, 6, 7, 8)
_ADD_BIAS, _ADD_BIAS_AND_RELU = 4, 6
_ALIGNED = 256, 16, 2  # bytes: CuPy's pool, what kernels read at once, the smallest element
_IN_FLOAT32 = 2  # what several blocks have summed is added up in the type of sums, not of the output
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
    """cublasLtMatmulHeuristicResult_t: an algorithm, the bytes that it needs, and what is not read here."""

    _fields_ = (("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("_rest", c_int * 5))


class Spec(NamedTuple):
    """What a plan depends on, but for the device and how addresses are aligned.

    cuBLAS sees the transposed product: (n, m) = (n, k) (k, m).
    kind: cudaDataType. transposed, leading: of the weight and the rows.
    """

    kind: int
    compute: int
    n: int
    m: int
    k: int
    transposed: tuple[int, int]
    leading: tuple[int, int]
    relu: bool


_plans, _failures = Plans(512), Failures()
_ONE_AND_ZERO = (ctypes.c_float * 2)(1.0, 0.0)


@functools.cache
def library() -> Any:
    """The functions of cuBLASLt, each returning its status; None where there is none beside CuPy's cuBLAS."""
    cupy_products.cublas()  # which loads it
    found = cupy_products.loaded("cublasLt")
    return None if found is None else declared(found)


def declared(found: Any) -> Any:
    """A library whose functions know what they take."""
    for name, arguments in _SIGNATURES.items():
        getattr(found, name).argtypes = arguments
    return found


def affine(rows: Array, weight: Array, bias: Array, *, relu: bool = False) -> Array | None:
    """rows @ weight + bias, and its positive part if `relu`; None where cuBLASLt does not serve, with nothing done.

    rows: (m, k), weight: (k, n), bias: (n,), of one dtype; sums are float32. Returns (m, n), C-contiguous.
    """
    (m, k), n, kind = rows.shape, weight.shape[1], cupy_products.data_type(rows.dtype)
    if dtype_name(rows.dtype) == "float64" or 0 in (m, k, n) or library() is None:
        return None
    first, second = cupy_products.operand(weight), cupy_products.operand(rows)
    transposed, leading = (first.transposed, second.transposed), (first.leading, second.leading)
    spec = Spec(kind, cupy_products.compute_type(kind), n, m, k, transposed, leading, relu)
    device, stream = cupy_plans.current()
    if _failures.get((spec, device)):
        return None
    out, bias = array_namespace(rows).empty((m, n), dtype=rows.dtype), contiguous(bias)
    addresses = tuple(map(cupy_products.pointer, (first.array, second.array, out, bias)))
    aligned = tuple(next(size for size in _ALIGNED if address % size == 0) for address in addresses)
    try:
        plan: _Plan = _plans.find((spec, aligned, device), functools.partial(_Plan, spec, aligned))
        plan.run(addresses, stream)
    except RuntimeError as error:
        shapes = f"({m}, {k}) by ({k}, {n}), {dtype_name(rows.dtype)}"
        warning = (
            f"cuBLASLt failed for {shapes}; the bias takes a pass over memory of its own: {cupy_plans.line(error)}"
        )
        _failures.add((spec, device), str(error), warning)
        return None
    return out


class _Plan:
    """A product that can be run: its descriptors, and the algorithm for weight, rows, output and bias so aligned."""

    def __init__(self, spec: Spec, aligned: tuple[int, ...]) -> None:
        self._made: list[tuple[str, c_void_p]] = []
        weakref.finalize(self, _give_back, library(), self._made).atexit = False
        self._product = self._make("MatmulDesc", spec.compute, 0)  # scalars are float32
        self._of_bias = aligned[3]  # so much an address tells before there is one
        epilogue = _ADD_BIAS_AND_RELU if spec.relu else _ADD_BIAS
        for attribute, value in zip((*_TRANSPOSED, _EPILOGUE), (*spec.transposed, epilogue), strict=True):
            self._set("MatmulDesc", self._product, attribute, c_int(value))
        self._set("MatmulDesc", self._product, _BIAS, c_uint64(self._of_bias))
        shapes = (spec.n, spec.k), (spec.k, spec.m), (spec.n, spec.m)
        ways = (*zip(spec.transposed, spec.leading, strict=True), (0, spec.n))
        self._layouts = [
            self._make("MatrixLayout", spec.kind, *(reversed(shape) if transposed else shape), leading)
            for shape, (transposed, leading) in zip(shapes, ways, strict=True)
        ]
        self._best = self._chosen(aligned)

    def _chosen(self, aligned: tuple[int, ...]) -> _Heuristic:
        wanted = self._make("MatmulPreference")
        self._set("MatmulPreference", wanted, _WORKSPACE, c_uint64(_MOST_WORKSPACE))
        self._set("MatmulPreference", wanted, _REDUCTION, c_int(_IN_FLOAT32))
        for attribute, size in zip(_ALIGNMENTS, (*aligned[:3], aligned[2]), strict=True):
            self._set("MatmulPreference", wanted, attribute, c_int(size))
        best, count = _Heuristic(), c_int()
        places = self._handle(), self._product, *self._layouts, self._layouts[2], wanted
        _checked("MatmulAlgoGetHeuristic", *places, 1, ctypes.byref(best), ctypes.byref(count))
        if count.value < 1 or best.state:
            raise RuntimeError("no algorithm for this shape")
        return best

    def run(self, addresses: tuple[int, ...], stream: int) -> None:
        """Enqueue the product of what lies at the addresses of weight, rows, output and bias."""
        weight, rows, out, bias = addresses
        if bias != self._of_bias:
            self._set("MatmulDesc", self._product, _BIAS, c_uint64(bias))
            self._of_bias = bias
        of_weight, of_rows, of_out = self._layouts
        size = self._best.workspace
        space = cupy_plans.workspace(size) if size else None  # kept until the product is enqueued
        one = ctypes.addressof(_ONE_AND_ZERO)
        _checked(
            "Matmul",
            *(self._handle(), self._product, one, weight, of_weight, rows, of_rows),
            *(one + 4, out, of_out, out, of_out, ctypes.addressof(self._best)),
            *(None if space is None else cupy_products.pointer(space), size, stream),
        )

    def _handle(self) -> int:
        return cupy_products.cublas()[1]  # good for cuBLASLt, too

    def _make(self, kind: str, *arguments: Any) -> c_void_p:
        made = c_void_p()
        _checked(f"{kind}Create", ctypes.byref(made), *arguments)
        self._made.append((kind, made))
        return made

    def _set(self, kind: str, of: c_void_p, attribute: int, value: Any) -> None:
        _checked(f"{kind}SetAttribute", of, attribute, ctypes.byref(value), ctypes.sizeof(value))


def _checked(function: str, *arguments: Any) -> None:
    status = getattr(library(), f"cublasLt{function}")(*arguments)
    if status:
        raise RuntimeError(f"cublasLt{function} returned status {status}")


def _give_back(functions: Any, made: list[tuple[str, c_void_p]]) -> None:
    for kind, descriptor in made:
        getattr(functions, f"cublasLt{kind}Destroy")(descriptor)
