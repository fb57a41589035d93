"""Products and linear maps by the native library: memory layouts, partial tiles and blocks, one thread and several."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import xformer as xf
from tests.ops.native_cases import kernels, needs_library, single  # noqa: F401
from tests.ops.numpy_cases import assert_same
from tests.reference import for_each, raises_line
from xformer import native, ops
from xformer.errors import ShapeError
from xformer.ops import linear
from xformer.ops.linear import project_heads
from xformer.ops.weights import PackedWeight

pytestmark = needs_library

LAYOUTS = {"rows": lambda x: x, "columns": lambda x: np.asfortranarray(x), "submatrix": lambda x: np.tile(x, (2, 2))}
SHAPES = [
    *((1, 300, 95), (1, 1100, 65), (1, 67, 4500), (2, 40, 47), (5, 300, 95), (40, 513, 48), (8, 300, 500)),
    *((43, 70, 1600), (95, 32, 145), (97, 47, 95), (391, 257, 49), (300, 300, 300), (1, 1, 1), (3, 17, 15)),
]


def arranged(layout, x):
    return LAYOUTS[layout](x)[: x.shape[0], : x.shape[1]]


def product(a, b, bias=None, *, out=None, add=False):
    out = np.empty((a.shape[0], b.shape[1]), np.float32) if out is None else out
    native.call("matmul", (a, b, out, bias), add)
    return out


@for_each("left, right", list(itertools.product(LAYOUTS, LAYOUTS)))
@for_each("shape", SHAPES)
def test_products(left, right, shape, mode):
    rows, depth, columns = shape
    a, b = arranged(left, single(rows, depth)), arranged(right, single(depth, columns, seed=1))
    expected, tolerance = a.astype("float64") @ b.astype("float64"), {"rtol": 0.0, "atol": 3e-6 * depth}
    bias = single(columns, seed=2)
    for own in {False, native.has_fused_products()}:  # with and without the BLAS library
        mode(own)
        np.testing.assert_allclose(product(a, b), expected, **tolerance)
        np.testing.assert_allclose(product(a, b, bias), expected + bias, **tolerance)
        total = single(rows, columns, seed=3)
        np.testing.assert_allclose(product(a, b, out=total.copy(), add=True), expected + total, **tolerance)


def test_an_output_within_a_larger_array():
    a, b, joint = single(7, 33), single(33, 20, seed=1), np.full((7, 64), 5.0, np.float32)
    product(a, b, out=joint[:, 16:36])
    np.testing.assert_allclose(joint[:, 16:36], a @ b, atol=1e-4)
    assert (joint[:, :16] == 5.0).all()
    assert (joint[:, 36:] == 5.0).all()


def test_matrices_of_several_axes():
    a, b, out = single(3, 1, 5, 9), single(2, 9, 7, seed=1), np.empty((3, 2, 5, 7), np.float32)
    native.call("matmul", (a, b, out))
    np.testing.assert_allclose(out, a @ b, atol=1e-4)


@for_each("shape", [(0, 40, 40), (40, 0, 40), (40, 40, 0), (1, 0, 40), (40, 1, 40)])
def test_products_of_a_single_column_or_of_no_elements(shape):
    rows, depth, columns = shape
    a, b = single(rows, depth), single(depth, columns, seed=1)
    np.testing.assert_array_equal(product(a, b), a @ b)


@pytest.mark.parametrize("shape", [(40, 64, 1000), (9, 64, 500), (1, 1000, 200), (300, 500, 700)], ids=str)
def test_neither_threads_nor_rows_nor_panels_change_the_bits(monkeypatch, reproducible, shape):
    rows, depth, columns = shape
    a, b, results = single(rows, depth), single(depth, columns, seed=1), []
    for threads in (1, 2, 5):
        monkeypatch.setenv("XFORMER_NUM_THREADS", str(threads))
        results += [product(a, b) for _ in range(20)]
    packed = np.empty((rows, columns), np.float32)
    native.call("matmul_packed", (a, PackedWeight.pack(b).panels, packed))
    results += [packed, np.concatenate([product(row[None], b) for row in a])]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_infinities_and_nan_propagate():
    a, b = single(100, 40), single(40, 40, seed=1)
    a[3, 5], a[7, 1] = np.nan, np.inf
    for result in (product(a, b), np.vstack([product(row[None], b) for row in a])):
        assert np.isnan(result[3]).all()
        assert not np.isfinite(result[7]).any()
        assert np.isfinite(np.delete(result, [3, 7], axis=0)).all()


@for_each(
    "arrays",
    [
        (single(3, 4), single(5, 6), np.empty((3, 6), np.float32)),
        (single(3, 4), single(4, 6), np.empty((3, 5), np.float32)),
        (single(3, 4), single(4, 6), np.empty((2, 6), np.float32)),
        (single(3, 4), single(4, 6), np.empty((6, 3), np.float32).T),
        (single(3, 4), single(4, 6).astype("float64"), np.empty((3, 6), np.float32)),
        (single(3, 4), single(4, 6), np.empty((3, 6), np.float32), single(5)),
        (single(4), single(4, 6), np.empty(6, np.float32)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(arrays):
    with raises_line(ShapeError, "matmul: "):
        native.call("matmul", arrays)


@for_each("shape", [(1, 4, 48), (2, 5, 48), (2, 4, 32), (8, 48)])
def test_panels_that_do_not_fit_are_refused(shape):
    with raises_line(ShapeError, "matmul_packed: "):
        native.call("matmul_packed", (single(3, 4), np.zeros(shape, np.float32), np.empty((3, 60), np.float32)))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("length", [1, 11, 40])
def test_linear(monkeypatch, bias, transposed, length):
    x, weight = single(3, length, 40), single(40, 72, seed=1)
    weight = np.asfortranarray(weight) if transposed else weight
    arrays = x, weight, single(72, seed=2) if bias else None
    assert "linear on numpy: native.linear" in ops.explain("linear", *arrays)
    assert_same(monkeypatch, linear, *[array for array in arrays if array is not None])


@pytest.mark.parametrize("length", [1, 11, 40])
def test_project_heads(monkeypatch, length):
    x, maps = single(3, length, 40), [single(40, 48, seed=seed) for seed in (1, 2)]
    assert ": native.project_heads" in ops.explain("project_heads", x, maps[0], None, maps[1], None, heads=(4, 3))

    def project(x, *maps):
        first, second = project_heads(x, (maps[0], None, 4), (maps[1], None, 3))
        return linear(first, second[0, 0, :, :12].mT)  # depends on both outputs

    assert_same(monkeypatch, project, x, *maps)


@for_each("rows", [1, 30, 600])
def test_a_program_returns_the_bits_of_the_function(rows):
    x, weight, bias = single(1, rows, 512), single(512, 96), single(96)
    jitted = xf.jit(linear)
    for number in range(3):
        np.testing.assert_array_equal(jitted(x + number, weight, bias), linear(x + number, weight, bias))
