"""Compiled products and linear maps: memory layouts, partial tiles and blocks, one thread and several."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.ops._numba.test_thread_pool import awake, helped
from tests.ops.numpy_cases import assert_same, normal
from xformer import ops
from xformer.ops import linear
from xformer.ops.linear.definition import project_heads

pytest.importorskip("numba")

from xformer.ops._numba import thread_pool as thread_pool
from xformer.ops.linear import numba as compiled

LAYOUTS = {"rows": lambda x: x, "columns": lambda x: np.asfortranarray(x), "submatrix": lambda x: np.tile(x, (2, 2))}


@pytest.fixture(autouse=True)
def compile_all(monkeypatch):
    """Enable the kernels, also for small matrices."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")
    monkeypatch.setattr(compiled, "_MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(compiled, "_MIN_ROW_MULTIPLICATIONS", 1)
    monkeypatch.setattr(thread_pool, "_MIN_MULTIPLICATIONS", 1)


def single(*shape, seed=0):
    return normal(*shape, seed=seed).astype("float32")


def arranged(layout, x):
    return LAYOUTS[layout](x)[: x.shape[0], : x.shape[1]]


SHAPES = [
    (1, 300, 95),
    (1, 1100, 65),
    (1, 67, 4500),
    (2, 40, 47),
    (5, 300, 95),
    (40, 513, 48),
    (8, 300, 500),
    (43, 70, 1600),
    (95, 32, 145),
    (97, 47, 95),
    (391, 257, 49),
]
LAYOUT_PAIRS = [("rows", "columns"), ("columns", "rows"), ("submatrix", "submatrix")]


@pytest.mark.parametrize(("left", "right"), LAYOUT_PAIRS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(left, right, shape):
    rows, depth, columns = shape
    a, b = arranged(left, single(rows, depth)), arranged(right, single(depth, columns, seed=1))
    expected = a.astype("float64") @ b.astype("float64")
    np.testing.assert_allclose(compiled._affine(a, b, None), expected, rtol=0.0, atol=3e-6 * depth)
    bias = single(2 * columns, seed=2)[::2]
    np.testing.assert_allclose(compiled._affine(a, b, bias), expected + bias, rtol=0.0, atol=3e-6 * depth)


@pytest.mark.parametrize("shape", [(0, 40, 40), (40, 0, 40), (40, 40, 0), (1, 0, 40), (40, 1, 40)], ids=str)
def test_products_of_a_single_column_or_of_no_elements(shape):
    rows, depth, columns = shape
    a, b = single(rows, depth), single(depth, columns, seed=1)
    np.testing.assert_array_equal(compiled._affine(a, b, None), a @ b)


@pytest.mark.parametrize(
    "shape", [(40, 64, 1000), (9, 64, 500), (1, 1000, 200), (1, 500, 1000), (9, 500, 1000)], ids=str
)
def test_the_number_of_threads_does_not_change_the_bits(monkeypatch, shape):
    rows, depth, columns = shape
    a, b, results = single(rows, depth), single(depth, columns, seed=1), []
    b = np.asfortranarray(b) if shape[1:] == (500, 1000) else b
    for threads in (1, 2, 5):
        monkeypatch.setenv("XFORMER_NUM_THREADS", str(threads))
        shared = []
        for _ in range(2000 if threads > 1 else 1):
            awake(threads - 1)
            results.append(compiled._affine(a, b, None))
            shared.append(threads > 1 and helped())
            if shared[-1]:
                break
        assert any(shared) == (threads > 1)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_infinities_and_nan_propagate():
    a, b = single(100, 40), single(40, 40, seed=1)
    a[3, 5], a[7, 1] = np.nan, np.inf
    for product in (compiled._affine(a, b, None), np.vstack([compiled._affine(row[None], b, None) for row in a])):
        assert np.isnan(product[3]).all()
        assert not np.isfinite(product[7]).any()
        assert np.isfinite(np.delete(product, [3, 7], axis=0)).all()
    b[2, 6], b[1, 39] = np.nan, np.inf
    for right in (b, np.asfortranarray(b)):
        (row,) = compiled._affine(a[:1], right, None)
        assert np.isnan(row[6])
        assert np.isinf(row[39])
        assert np.isfinite(np.delete(row, [6, 39])).all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_linear(monkeypatch, bias, transposed):
    x, weight = single(3, 11, 40), single(40, 72, seed=1)
    weight = np.asfortranarray(weight) if transposed else weight
    arrays = x, weight, single(72, seed=2) if bias else None
    assert ": numba.linear" in ops.explain("linear", *arrays)
    assert_same(monkeypatch, linear, *[array for array in arrays if array is not None])


def test_project_heads(monkeypatch):
    x, maps = single(3, 11, 40), [single(40, 48, seed=seed) for seed in (1, 2)]
    assert ": numba.project_heads" in ops.explain("project_heads", x, maps[0], None, maps[1], None, heads=(4, 3))

    def project(x, *maps):
        first, second = project_heads(x, (maps[0], None, 4), (maps[1], None, 3))
        return linear(first, second[0, 0, :, :12].mT)  # depends on both outputs

    assert_same(monkeypatch, project, x, *maps)


@pytest.mark.parametrize("rows", [1, 8])
def test_rows_at_any_distance_in_memory(rows):
    a, b = single(2 * rows, 96)[::2], single(64, 96, seed=1)[:, :48]
    for right in (b, b.T):
        left = a[:, : right.shape[0]]
        expected = left.astype("float64") @ right.astype("float64")
        np.testing.assert_allclose(compiled._affine(left, right, None), expected, rtol=0.0, atol=3e-4)


def test_a_single_row_is_compiled():
    assert "linear on numpy: numba.linear" in ops.explain("linear", single(1, 8), single(8, 8), None)


def test_blas_multiplies_matrices_of_many_rows(monkeypatch):
    for rows in (1, compiled._MAX_ROWS, compiled._MAX_ROWS + 1, 600):
        x, weight, bias = single(1, rows, 512), single(512, 96), single(96)
        is_few = rows <= compiled._MAX_ROWS
        for operation, options in (("linear", {}), ("project_heads", {"heads": (4,)})):
            lines = ops.explain(operation, x, weight, bias, **options).splitlines()
            assert lines[0] == f"{operation} on numpy: {'numba' if is_few else 'numpy'}.{operation}"
            assert any(f"not numba.{operation}: more than 43 rows" in line for line in lines) != is_few
        assert_same(monkeypatch, linear, x, weight, bias)
        captured = xf.capture(linear)
        for number in range(3):
            np.testing.assert_array_equal(captured(x + number, weight, bias), linear(x + number, weight, bias))
