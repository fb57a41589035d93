"""cuBLAS as CuPy binds it, on the memory of NumPy arrays: addresses, column-major matrices, strides between them."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

DTYPES = {0: "float32", 1: "float64", 2: "float16", 14: "bfloat16"}
HANDLE = 12345


def dtype_named(name):
    """NumPy's dtype; skips the test where nothing names bfloat16."""
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if name == "bfloat16" else name)


def strided(address, dtype, shape, strides):
    """The array at an address, strides in elements; writing to it writes there."""
    dtype = np.dtype(dtype)
    elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_uint8 * (elements * dtype.itemsize)).from_address(address)
    flat = np.frombuffer(memory, dtype)
    return np.lib.stride_tricks.as_strided(flat, shape, [stride * dtype.itemsize for stride in strides])


class Binding:
    """calls: the keyword arguments of each call, by the names that cuBLAS gives them."""

    def __init__(self):
        self.calls = []

    def gemmBatchedEx(self, *arguments):
        """The same for matrices at addresses."""
        *sizes, A, Atype, lda, B, Btype, ldb, beta, C, Ctype, ldc, count, computeType, algo = arguments
        for a, b, c in zip(*(strided(each, "uint64", (count,), (1,)) for each in (A, B, C)), strict=True):
            matrices = int(a), Atype, lda, 0, int(b), Btype, ldb, 0, beta, int(c), Ctype, ldc, 0
            self.gemmStridedBatchedEx(*sizes, *matrices, 1, computeType, algo)

    def gemmStridedBatchedEx(
        self,
        handle,
        transa,
        transb,
        m,
        n,
        k,
        alpha,
        A,
        Atype,
        lda,
        strideA,
        B,
        Btype,
        ldb,
        strideB,
        beta,
        C,
        Ctype,
        ldc,
        strideC,
        batchCount,
        computeType,
        algo,
    ):
        """C = alpha op(A) op(B) + beta C for each matrix of the batch."""
        self.calls.append({name: value for name, value in locals().items() if name != "self"})
        computes = {0: (68, 77), 1: (70,)}.get(Atype, (68,))
        if handle != HANDLE or min(m, n, k, batchCount) < 1 or computeType not in computes:
            raise ValueError("CUBLAS_STATUS_INVALID_VALUE")
        if lda < (k if transa else m) or ldb < (n if transb else k) or ldc < m or Btype != Atype:
            raise ValueError("CUBLAS_STATUS_INVALID_VALUE")
        if Ctype != Atype and not (Ctype == 0 and Atype in (2, 14)):
            raise ValueError("CUBLAS_STATUS_NOT_SUPPORTED")
        scalar = np.float64 if computeType == 70 else np.float32
        alpha, beta = (strided(address, scalar, (), ()) for address in (alpha, beta))

        def matrices(address, kind, rows, columns, leading, step, transposed):
            shape = (batchCount, columns, rows) if transposed else (batchCount, rows, columns)
            found = strided(address, dtype_named(DTYPES[kind]), shape, (step, 1, leading))
            return found.swapaxes(1, 2) if transposed else found

        a = matrices(A, Atype, m, k, lda, strideA, transa).astype(scalar)
        b = matrices(B, Btype, k, n, ldb, strideB, transb).astype(scalar)
        c = matrices(C, Ctype, m, n, ldc, strideC, False)
        kept = beta * c.astype(scalar) if beta else 0.0  # as in BLAS, what stands there is not read for beta 0
        c[...] = (alpha * (a @ b) + kept).astype(c.dtype)
