"""Batched matrix products on CuPy.

CuPy's own matmul of more than two axes turns float16 into float32, fails for bfloat16 and copies transposed operands
(cupy issue 10317), and what CuPy binds of cuBLAS refuses to be recorded as a CUDA graph. Here cuBLAS is called as C has
it, with CuPy's handle: sums are kept in float32 (float64 for float64), and operands are read where they lie wherever
one batch stride can say so.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import math
import os
from ctypes import c_double, c_float, c_int, c_int64, c_void_p
from typing import Any, NamedTuple

from xformer.backends import Array, DType, array_namespace, dtype_name
from xformer.environment import env_flag
from xformer.kernels.cupy import plans as cupy_plans
from xformer.kernels.cupy.launch import cuda

# cudaDataType, and cublasComputeType with the dtype of the scalars that goes with it.
_DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_TF32 = 68, 70, 77
_DEFAULT_ALGORITHM = -1  # tensor cores wherever the types allow them
_VERSIONS = 13, 12
_MOST = 2**31 - 1  # sizes and leading dimensions are C ints


def tf32() -> bool:
    """Whether float32 products may round their operands to 10 bits of mantissa, which tensor cores multiply."""
    return env_flag("XFORMER_TF32")


def pointer(array: Array) -> int:
    """The address of an array's first element, on the device."""
    return array.data.ptr  # type: ignore[no-any-return]


def cublas() -> tuple[Any, int]:
    """cuBLAS, whose products take the current stream, and CuPy's handle for this thread and device."""
    return _binding(), cuda().device.get_cublas_handle()


@functools.cache
def _binding() -> Any:
    library = loaded("cublas")  # by the handle, of CuPy
    return importlib.import_module("cupy_backends.cuda.libs.cublas") if library is None else _Direct(library)


def loaded(name: str) -> Any:
    """A library that CuPy has loaded, or None where it is not found by its name."""
    for version in _VERSIONS:
        try:
            return ctypes.CDLL(f"lib{name}.so.{version}", mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
        except (OSError, AttributeError):
            continue
    return None


class _Direct:
    """cuBLAS as C has it, its one function as CuPy names it."""

    def __init__(self, library: Any) -> None:
        names = "SetStream_v2", "GemmEx", "GemmStridedBatchedEx"
        self._set_stream, self._one, self._batch = (getattr(library, f"cublas{name}") for name in names)
        sizes, matrix = [c_void_p, *[c_int] * 5, c_void_p], [c_void_p, c_int, c_int]
        self._set_stream.argtypes = [c_void_p] * 2
        self._one.argtypes = [*sizes, *matrix * 2, c_void_p, *matrix, c_int, c_int]
        self._batch.argtypes = [*sizes, *[*matrix, c_int64] * 2, c_void_p, *matrix, c_int64, *[c_int] * 3]

    def gemmStridedBatchedEx(self, handle: int, *given: Any) -> None:
        status = self._set_stream(handle, cupy_plans.current()[1])
        if not status and given[19] == 1:  # one product, without steps
            status = self._one(handle, *given[:9], *given[10:13], *given[14:18], *given[20:])
        elif not status:
            status = self._batch(handle, *given)
        if status:
            raise RuntimeError(f"cuBLAS returned status {status}")


def data_type(dtype: DType) -> int:
    """The cudaDataType of a dtype."""
    return _DATA_TYPES[dtype_name(dtype)]


def compute_type(kind: int) -> int:
    """The cublasComputeType of products of a cudaDataType: float32 for 16 bits, and TF32 only where it is asked for."""
    return _COMPUTE_64F if kind == 1 else _COMPUTE_TF32 if kind == 0 and tf32() else _COMPUTE_32F


def batched_product(
    a: Array, b: Array, *, alpha: float = 1.0, dtype: DType | None = None, more: Array | None = None
) -> Array:
    """alpha a @ b, summed in float32 (float64 for float64), of `dtype`, by default that of the operands.

    a: (..., m, k), b: (..., k, n), one dtype and one shape before the last two axes; `dtype` may also be float32 for
    operands of 16 bits. Returns (..., m, n), C-contiguous; `more`, if given, of that shape, memory and dtype, is added,
    and written in place.
    """
    xp, (m, k), n, batch = array_namespace(a, b), a.shape[-2:], b.shape[-1], a.shape[:-2]
    shape, dtype = (*batch, m, n), a.dtype if dtype is None else dtype
    if (batch, k, a.dtype) != (b.shape[:-2], b.shape[-2], b.dtype):  # cuBLAS, which sees addresses, could not tell
        raise ValueError(f"operands {a.shape} {a.dtype} and {b.shape} {b.dtype}; expected (..., m, k) and (..., k, n)")
    if more is not None and (more.shape != shape or more.dtype != dtype or not more.flags.c_contiguous):
        raise ValueError(f"more is {more.shape} {more.dtype}; expected {shape} {dtype} in C order")
    if k == 0 or 0 in shape:
        return xp.zeros(shape, dtype=dtype) if more is None else more
    out = xp.empty(shape, dtype=dtype) if more is None else more
    first, second = operand(b), operand(a)
    kind, out_kind = data_type(a.dtype), data_type(dtype)
    compute = compute_type(kind)
    scalars = _scalars(float(alpha), float(more is not None), compute)
    binding, handle = cublas()
    # cuBLAS counts rows along memory: a row-major product is to it the transposed one, (a b)' = b' a'.
    binding.gemmStridedBatchedEx(
        *(handle, first.transposed, second.transposed, n, m, k, scalars.alpha),
        *(pointer(first.array), kind, first.leading, first.step),
        *(pointer(second.array), kind, second.leading, second.step),
        *(scalars.beta, pointer(out), out_kind, n, m * n, math.prod(batch), compute, _DEFAULT_ALGORITHM),
    )
    return out


class Operand(NamedTuple):
    """Matrices as cuBLAS takes them: rows `leading` elements apart, matrices `step`; transposed: columns instead."""

    array: Array
    transposed: int
    leading: int
    step: int


def operand(x: Array) -> Operand:
    """Describe matrices (..., rows, columns), copied only where no description fits."""
    found = _described(x.shape, x.strides, x.itemsize)
    if found is None:
        x = x.copy()
        found = _described(x.shape, x.strides, x.itemsize)
    if found is None:
        raise ValueError(f"matrices of shape {tuple(x.shape)} are larger than cuBLAS takes; expected sides below 2**31")
    return Operand(x, *found)


@functools.lru_cache(maxsize=4096)
def _described(shape: tuple[int, ...], in_bytes: tuple[int, ...], itemsize: int) -> tuple[int, int, int] | None:
    """What an Operand says of an array."""
    *strides, row, column = (stride // itemsize for stride in in_bytes)
    rows, columns = shape[-2:]
    step = _one_step(shape[:-2], strides)
    if step is None or any(stride % itemsize for stride in in_bytes):
        return None
    for transposed, near, along, leading in ((0, column, columns, row), (1, row, rows, column)):
        if (near == 1 or along == 1) and along <= leading <= _MOST:
            return transposed, leading, step
    return None


def _one_step(shape: tuple[int, ...], strides: list[int]) -> int | None:
    """The one stride that goes through all axes as if they were one, or None; axes of one element have no say."""
    step, count = None, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 1:
            continue
        step = stride if step is None else step
        if stride < 0 or stride != step * count:
            return None
        count *= size
    return step or 0


class _Scalars(NamedTuple):
    """Where cuBLAS reads alpha and beta on the host, during the call; the buffer they lie in."""

    buffer: Any
    alpha: int
    beta: int


@functools.lru_cache(maxsize=64)
def _scalars(alpha: float, beta: float, compute: int) -> _Scalars:
    kind = c_double if compute == _COMPUTE_64F else c_float
    buffer = (kind * 2)(alpha, beta)
    address = ctypes.addressof(buffer)
    return _Scalars(buffer, address, address + ctypes.sizeof(kind))
