"""Softmax on CuPy equals the portable definition."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np

from tests.ops._cupy.cuda_cases import DTYPES, LAYOUTS, normal
from tests.reference import for_each, raises_line
from xformer import ops, vjp
from xformer.backends import to_host
from xformer.errors import ShapeError
from xformer.kernels.cupy.launch import grid_for_shared_rows
from xformer.ops import softmax

MASKS = {
    "none": None,
    "keys of a sentence": (2, 1, 1, 11),
    "queries and keys": (5, 11),
    "queries": (1, 1, 5, 1),
    "full": (2, 3, 5, 11),
    "heads": (3, 1, 11),
    "one": (1,),
}


@for_each("dtype", DTYPES)
@for_each("mask", MASKS)
def test_softmax(cuda, dtype, mask):
    shape = MASKS[mask]
    allowed = None if shape is None else np.random.default_rng(5).random(shape) < 0.6
    scores = normal(2, 3, 5, 11)
    assert cuda.served("softmax", cuda.array(scores, dtype), None if shape is None else cuda.array(allowed))
    cuda.agree(softmax, *([scores] if shape is None else [scores, allowed]), dtype=dtype)


@for_each("dtype", ["float32", "bfloat16"])
@for_each("shape", [(7,), (3, 1), (4, 700), (3, 5000), (2, 5001), (0, 5), (2, 2, 2, 2, 2, 3)])
def test_softmax_of_rows_of_any_length(cuda, shape, dtype):
    cuda.agree(softmax, 30.0 * normal(*shape), dtype=dtype)


@for_each("dtype", DTYPES)
def test_the_largest_numbers_of_a_dtype(cuda, dtype):
    """A mask that is added may be the lowest number of the dtype."""
    lowest = float(ml_dtypes.finfo(cuda.xp.dtype_named(dtype)).min)
    scores = np.full((3, 16), lowest)
    scores[1, 3], scores[2, :8] = -lowest, 1.0
    expected = np.stack([np.full(16, 1 / 16), np.arange(16) == 3, np.where(np.arange(16) < 8, 1 / 8, 0.0)])
    np.testing.assert_allclose(to_host(softmax(cuda.array(scores, dtype))).astype(float), expected, rtol=1e-6)


@for_each("dtype", DTYPES)
@for_each("view", [np.s_[:, 1:65], np.s_[:, :128:2], np.s_[:, 64:0:-1], np.s_[::2, 8:72], np.s_[:1, :64]])
def test_views_of_masks(cuda, dtype, view):
    """Those of which vectors are aligned, and those of which they are not."""
    scores, mask = normal(3, 64), cuda.array(np.random.default_rng(5).random((6, 144)) < 0.6)[:, :128]
    mask = mask[view][:3]
    got = to_host(softmax(cuda.array(scores, dtype), mask)).astype(float)
    tolerance = {"float32": 1e-6, "float64": 1e-12}.get(dtype, 1e-2)
    np.testing.assert_allclose(got, softmax_by_hand(scores, to_host(mask)), atol=tolerance)


@for_each("dtype", DTYPES)
@for_each("n", [1, 4, 31, 32, 33, 64, 65, 512, 1024])
def test_short_rows_share_blocks(cuda, dtype, n):
    """Blocks have more rows than are left; a row with NaN does not change its neighbors."""
    scores, mask = normal(37, n), np.random.default_rng(5).random((37, n)) < 0.8
    cuda.agree(softmax, scores, mask, dtype=dtype)
    scores[5, 0], scores[7] = np.nan, -np.inf
    y = to_host(softmax(cuda.array(scores, dtype))).astype("float64")
    np.testing.assert_array_equal(np.isnan(y).any(axis=-1), np.arange(37) == 5)
    assert not y[7].any()
    _, pull = vjp(softmax, cuda.array(scores, dtype))
    (dx,) = pull(cuda.array(np.ones((37, n)), dtype))
    np.testing.assert_array_equal(np.isnan(to_host(dx).astype("float64")).any(axis=-1), np.arange(37) == 5)


def test_grids_of_short_rows():
    for n, vectors, expected in [
        (1, 1, (3, 128, 1)),
        (4, 1, (3, 128, 1)),
        (5, 1, (5, 128, 2)),
        (32, 1, (19, 128, 8)),
        (33, 1, (38, 128, 16)),
        (100, 1, (75, 128, 32)),
        (129, 2, (75, 128, 32)),
        (256, 2, (75, 128, 32)),
        (257, 2, (300, 64, 64)),
        (70000, 2, (300, 512, 512)),
    ]:
        assert grid_for_shared_rows(300, np.empty((300, n), np.float32), vectors) == expected
    assert grid_for_shared_rows(300, np.empty((300, 5), np.float32), 4, 32) == (75, 128, 32)


def test_a_mask_with_more_strided_axes_than_the_kernel_takes(cuda):
    x, mask = normal(2, 2, 2, 2, 2, 3), np.random.default_rng(6).random((2, 1, 2, 1, 2, 1)) < 0.5
    got = to_host(softmax(cuda.array(x), cuda.array(mask)))
    np.testing.assert_allclose(got, softmax_by_hand(x, mask), rtol=1e-12)
    swapped = np.random.default_rng(6).random((3, 2)) < 0.5
    got = to_host(softmax(cuda.array(x), cuda.array(swapped).T))
    np.testing.assert_allclose(got, softmax_by_hand(x, swapped.T), rtol=1e-12)


def softmax_by_hand(x, mask):
    powers = np.where(mask, np.exp(x), 0.0)
    total = powers.sum(axis=-1, keepdims=True)
    return np.divide(powers, total, out=np.zeros_like(powers), where=total > 0)


@for_each("dtype", DTYPES)
def test_fully_masked_rows_give_zeros_and_zero_gradients(cuda, dtype):
    x, mask = normal(4, 9), np.ones((4, 9), bool)
    mask[1] = False
    x[2] = -np.inf
    y, pull = vjp(lambda x: softmax(x, cuda.array(mask)), cuda.array(x, dtype))
    (dx,) = pull(cuda.array(normal(4, 9, seed=1), dtype))
    np.testing.assert_array_equal(to_host(y).any(axis=-1), [True, False, False, True])
    np.testing.assert_array_equal(to_host(dx).any(axis=-1), [True, False, False, True])


def test_unsupported_masks(cuda):
    x, mask = cuda.array(normal(1, 3)), cuda.array(np.ones((4, 3), bool))
    for wrong, match in [
        (mask, r"softmax got mask of shape \(4, 3\); expected a shape that broadcasts to .* \(1, 3\)"),
        (cuda.array(np.ones((1, 3), np.int64)), "softmax got mask of dtype int64; expected bool"),
    ]:
        for call in (softmax, functools.partial(ops.explain, "softmax")):
            with raises_line(ShapeError, match):
                call(x, wrong)


@for_each("layout", LAYOUTS)
@for_each("dtype", ["float32", "bfloat16"])
def test_layouts(cuda, layout, dtype):
    cuda.agree(softmax, normal(5, 16), dtype=dtype, layout=LAYOUTS[layout])
