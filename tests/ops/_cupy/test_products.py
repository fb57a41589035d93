"""In reproducible mode, products on CuPy are one chain of fused products, with the bits of the native library."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops._cupy.cuda_cases import normal
from tests.reference import for_each
from xformer import native
from xformer.backends import to_host
from xformer.kernels.cupy.cublas import batched_product
from xformer.ops import linear

SHAPES = [((1,), 1, 1, 1), ((), 5, 7, 3), ((2, 3), 65, 33, 70), ((3,), 4, 130, 64)]


def multiply(cuda, x, w, **options):
    return to_host(batched_product(cuda.array(x), cuda.array(w), **options))


@for_each("batch, rows, depth, columns", SHAPES)
@for_each("x_transposed, w_transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_bits_are_those_of_the_native_library(
    cuda, reproducible, batch, rows, depth, columns, x_transposed, w_transposed
):
    x, w = (normal(*batch, *sizes, seed=depth).astype("float32") for sizes in ((rows, depth), (depth, columns)))
    arrays = [
        np.ascontiguousarray(each.swapaxes(-1, -2)).swapaxes(-1, -2) if transposed else each
        for each, transposed in ((x, x_transposed), (w, w_transposed))
    ]
    out = np.empty((*batch, rows, columns), "float32")
    native.call("matmul", (x, w, out, None))
    assert np.array_equal(multiply(cuda, *arrays), out)
    addend = normal(*out.shape, seed=3).astype("float32")
    total = multiply(cuda, *arrays, addend=cuda.array(addend))
    native.call("matmul", (x, w, addend, None), 1)
    assert np.array_equal(total, addend)


@for_each("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_row_is_the_row_alone(cuda, reproducible, dtype):
    cuda.agree(linear, normal(70, 40), normal(40, 30, seed=1), normal(30, seed=2), dtype=dtype)
    arrays = [cuda.array(each, dtype) for each in (normal(70, 40), normal(40, 30, seed=1), normal(30, seed=2))]
    together = to_host(linear(*arrays))
    for row in (0, 33, 69):
        alone = to_host(linear(arrays[0][row : row + 1], *arrays[1:]))
        assert np.array_equal(alone[0], together[row])


def test_products_of_cublas_are_noticed(cuda, mode):
    """Without the mode, the stand-in or cuBLAS computes, whose sums have another order."""
    x, w = normal(64, 700).astype("float32"), normal(700, 64, seed=1).astype("float32")
    bits = {}
    for reproducible in (False, True):
        mode(reproducible)
        bits[reproducible] = multiply(cuda, x, w)
    if not native.has_fused_products():
        pytest.skip("the native library has no fused products")
    assert not np.array_equal(bits[False], bits[True])
