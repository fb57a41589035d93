"""Batched matrix products on CuPy.

CuPy's own matmul of more than two axes converts float16 to float32, fails for bfloat16 and copies transposed operands
(cupy issue 10317), and its cuBLAS binding cannot be captured in a CUDA graph. So cuBLAS is called through ctypes, with
CuPy's handle. It accumulates in float32 (float64 for float64), and operands are copied only if they have no single
batch stride.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from contextvars import ContextVar
from ctypes import c_double, c_float, c_int, c_int64, c_size_t, c_void_p
from typing import Any, NamedTuple

from xformer.backends import DType, array_namespace, dtype_name
from xformer.backends import NativeArray as Array
from xformer.environment import env_flag
from xformer.kernels.cupy import launch
from xformer.kernels.cupy.calls import enqueue
from xformer.kernels.cupy.calls import pointer as pointer
from xformer.kernels.cupy.launch import cuda
from xformer.native import is_reproducible

# cudaDataType and cublasComputeType.
_DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _COMPUTE_64F, _COMPUTE_TF32 = 68, 70, 77
_DEFAULT_ALGORITHM = -1  # tensor cores if the dtypes allow it
_MAX_SIZE = 2**31 - 1  # sizes and leading dimensions are C ints
# cublasStatus_t
_NAMES = "NOT_INITIALIZED ALLOC_FAILED INVALID_VALUE ARCH_MISMATCH MAPPING_ERROR EXECUTION_FAILED INTERNAL_ERROR "
_STATUSES = dict(zip((1, 3, 7, 8, 11, 13, 14, 15), f"{_NAMES}NOT_SUPPORTED".split(), strict=True))
NOT_SUPPORTED = 15
_UNSUPPORTED = 7, 8, NOT_SUPPORTED


def tf32() -> bool:
    """Return whether XFORMER_TF32 lets float32 products round their operands to 10 bits, for tensor cores."""
    return env_flag("XFORMER_TF32")


def binding_and_handle() -> tuple[Any, int]:
    """Return cuBLAS, which uses the current stream, and CuPy's handle for this thread and device."""
    handle = cuda().device.get_cublas_handle()  # the first one loads cuBLAS
    return _binding(), handle


@functools.cache
def _binding() -> Any:
    library = loaded("cublas")
    return cuda().cublas if library is None else _Direct(library)


def loaded(name: str) -> Any:
    """Return a library that CuPy has loaded, or None."""
    version = cuda().runtime.runtimeGetVersion() // 1000  # that CuPy was built for; torch may have loaded another one
    try:
        return ctypes.CDLL(f"lib{name}.so.{version}", mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
    except (OSError, AttributeError):
        return None


class CublasError(RuntimeError):
    """A status other than success; `is_unsupported` if the library does not support the arguments."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function} returned CUBLAS_STATUS_{_STATUSES.get(status, status)}")
        self.is_unsupported = status in _UNSUPPORTED


# Address and size of the workspace of products that a CUDA graph captures; cuBLAS would otherwise allocate one for each
# of them inside the graph.
WORKSPACE: ContextVar[tuple[int, int] | None] = ContextVar("workspace", default=None)


class _Direct:
    """cuBLAS through ctypes, with the interface of CuPy's binding."""

    def __init__(self, library: Any) -> None:
        self._library = library
        sizes, matrix = [c_void_p, *[c_int] * 5, c_void_p], [c_void_p, c_int, c_int]
        library.cublasSetStream_v2.argtypes = [c_void_p] * 2
        library.cublasSetWorkspace_v2.argtypes = [c_void_p, c_void_p, c_size_t]
        library.cublasGemmEx.argtypes = [*sizes, *matrix * 2, c_void_p, *matrix, c_int, c_int]
        library.cublasGemmBatchedEx.argtypes = [*sizes, *matrix * 2, c_void_p, *matrix, *[c_int] * 3]
        library.cublasGemmStridedBatchedEx.argtypes = [
            *(*sizes, *[*matrix, c_int64] * 2, c_void_p, *matrix, c_int64, *[c_int] * 3)
        ]

    def gemmStridedBatchedEx(self, handle: int, *arguments: Any) -> None:
        if arguments[19] == 1:  # a single product, without batch strides
            arguments = *arguments[:9], *arguments[10:13], *arguments[14:18], *arguments[20:]
            self._enqueue("cublasGemmEx", handle, *arguments)
        else:
            self._enqueue("cublasGemmStridedBatchedEx", handle, *arguments)

    def gemmBatchedEx(self, *arguments: Any) -> None:
        self._enqueue("cublasGemmBatchedEx", *arguments)

    def _enqueue(self, function: str, handle: int, *arguments: Any) -> None:
        self._call("cublasSetStream_v2", handle, launch.current()[1])  # which also resets the workspace
        if (workspace := WORKSPACE.get()) is not None:
            self._call("cublasSetWorkspace_v2", handle, *workspace)
        self._call(function, handle, *arguments)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, function)(*arguments)
        if status:
            raise CublasError(function, status)


def data_type(dtype: DType) -> int:
    """Return the cudaDataType of a dtype."""
    return _DATA_TYPES[dtype_name(dtype)]


def compute_type(data_type: int) -> int:
    """Return the cublasComputeType for operands of a cudaDataType: float32 for 16 bits, TF32 only if requested."""
    return _COMPUTE_64F if data_type == 1 else _COMPUTE_TF32 if data_type == 0 and tf32() else _COMPUTE_32F


def batched_product(
    a: Array, b: Array, *, alpha: float = 1.0, dtype: DType | None = None, addend: Any = None, distance: int = 0
) -> Array:
    """Compute alpha a @ b + addend, accumulated in float32 (float64 for float64).

    Args:
        a: Array of shape (..., m, k).
        b: Array of shape (..., k, n), with the dtype and batch shape of a.
        alpha: Scale of the product.
        dtype: Dtype of the result: that of the operands (default), or float32 for 16-bit operands.
        addend: C-contiguous array with the shape and dtype of the result, which overwrites it.
        distance: If not 0, multiply the matrix a by b, which is in C order, and by another one that many elements on.

    Returns:
        C-contiguous array of shape (..., m, n), with a distance (2, m, n).
    """
    xp, (m, k), n, batch = array_namespace(a, b), a.shape[-2:], b.shape[-1], (2,) if distance else a.shape[:-2]
    shape, dtype = (*batch, m, n), a.dtype if dtype is None else dtype
    if (a.shape[:-2], k, a.dtype) != (b.shape[:-2], b.shape[-2], b.dtype):  # cuBLAS gets addresses and cannot check
        raise ValueError(f"operands {a.shape} {a.dtype} and {b.shape} {b.dtype}; expected (..., m, k) and (..., k, n)")
    if addend is not None and (addend.shape != shape or addend.dtype != dtype or not addend.flags.c_contiguous):
        raise ValueError(f"addend is {addend.shape} {addend.dtype}; expected {shape} {dtype} in C order")
    if k == 0 or 0 in shape:
        return xp.zeros(shape, dtype=dtype) if addend is None else addend
    out = launch.empty(a, shape, dtype) if addend is None else addend
    first, second = operand(b), operand(a)
    first = first._replace(step=distance) if distance else first
    if is_reproducible():  # cuBLAS chooses its order of sums by the shapes
        tiles = math.prod(batch) * -(-m // 64) * -(-n // 64)
        sizes = m, k, n, float(alpha), int(addend is not None)
        dtypes = dtype_name(a.dtype), dtype_name(dtype)
        launch.launch("products.matmul", dtypes, tiles, 256, *second.strides(), *first.strides(), out, *sizes)
        return out
    in_type, out_type = data_type(a.dtype), data_type(dtype)
    compute = compute_type(in_type)
    scalars = _scalars(float(alpha), float(addend is not None), compute)
    # cuBLAS is column-major, so it computes the transposed product: (a b)^T = b^T a^T.
    sizes = first.transposed, second.transposed, n, m, k
    matrices = (in_type, first.leading, first.step), (in_type, second.leading, second.step)
    settings = out_type, n, m * n, math.prod(batch), compute, _DEFAULT_ALGORITHM
    enqueue(_run, (scalars, sizes, *matrices, settings), (first.array, second.array, out))
    return out


def _run(scalars: _Scalars, sizes: Any, first: Any, second: Any, settings: Any, arrays: tuple[Array, ...]) -> None:
    a, b, out = map(pointer, arrays)
    binding, handle = binding_and_handle()
    binding.gemmStridedBatchedEx(handle, *sizes, scalars.alpha, a, *first, b, *second, scalars.beta, out, *settings)


def product_at(addresses: Array, a: Array, b: Array, out: Array) -> None:
    """Compute a @ b for matrices at addresses on the device, (3, n): those of a, of b, and of the results.

    Args:
        addresses: Array of shape (3, n), 8 bytes each.
        a: A matrix (m, k) in C order, as all at the first addresses.
        b: A matrix (k, n), as all at the second.
        out: A matrix (m, n) in C order, as all at the last.
    """
    first, kind = operand(b), data_type(a.dtype)
    compute = compute_type(kind)
    sizes, matrices = (first.transposed, 0, out.shape[1], *a.shape), [(kind, first.leading), (kind, a.shape[1])]
    settings = kind, out.shape[1], addresses.shape[1], compute, _DEFAULT_ALGORITHM
    enqueue(_run_at, (_scalars(1.0, 0.0, compute), sizes, *matrices, settings, addresses.strides[0]), (addresses,))


def _run_at(scalars: _Scalars, sizes: Any, first: Any, second: Any, settings: Any, step: int, arrays: Any) -> None:
    of_a, (binding, handle) = pointer(arrays[0]), binding_and_handle()
    of_b, of_out = of_a + step, of_a + 2 * step
    binding.gemmBatchedEx(handle, *sizes, scalars.alpha, of_b, *first, of_a, *second, scalars.beta, of_out, *settings)


class Operand(NamedTuple):
    """Matrices for cuBLAS, with rows (columns if transposed) `leading` and matrices `step` elements apart."""

    array: Array
    transposed: int
    leading: int
    step: int

    def strides(self) -> tuple[Any, int, int, int]:
        """Return the array and the distances of rows, columns and matrices in elements."""
        return self.array, *((1, self.leading) if self.transposed else (self.leading, 1)), self.step


def operand(x: Array) -> Operand:
    """Describe matrices (..., rows, columns), which are copied if their strides do not fit."""
    layout = _operand_layout(x.shape, x.strides, x.itemsize)
    if layout is None:
        if 0 < abs(x.strides[-2]) < abs(x.strides[-1]):  # by columns: a copy in this order reads memory in sequence
            x = x.swapaxes(-1, -2).copy().swapaxes(-1, -2)
        else:
            x = x.copy()
        layout = _operand_layout(x.shape, x.strides, x.itemsize)
    if layout is None:
        raise ValueError(f"matrices have shape {tuple(x.shape)}; cuBLAS expects sizes below 2**31")
    return Operand(x, *layout)


@functools.lru_cache(maxsize=4096)
def _operand_layout(
    shape: tuple[int, ...], byte_strides: tuple[int, ...], itemsize: int
) -> tuple[int, int, int] | None:
    """Return transposed, leading and step of an Operand, or None."""
    *strides, row, column = (stride // itemsize for stride in byte_strides)
    rows, columns = shape[-2:]
    step = _batch_step(shape[:-2], strides)
    if step is None or any(stride % itemsize for stride in byte_strides):
        return None
    for transposed, stride, size, leading in ((0, column, columns, row), (1, row, rows, column)):
        if (stride == 1 or size == 1) and size <= leading <= _MAX_SIZE:
            return transposed, leading, step
    return None


def _batch_step(shape: tuple[int, ...], strides: list[int]) -> int | None:
    """Return the stride of all axes merged into one, or None; axes of size 1 do not matter."""
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
    """Host addresses of alpha and beta, which cuBLAS reads during the call, and their buffer."""

    buffer: Any
    alpha: int
    beta: int


@functools.lru_cache(maxsize=64)
def _scalars(alpha: float, beta: float, compute: int) -> _Scalars:
    c_type = c_double if compute == _COMPUTE_64F else c_float
    buffer = (c_type * 2)(alpha, beta)
    address = ctypes.addressof(buffer)
    return _Scalars(buffer, address, address + ctypes.sizeof(c_type))
