"""Dropout on CuPy equals the portable definition."""

from __future__ import annotations

import functools

import numpy as np

from tests.ops._cupy.cuda_cases import DTYPES, normal
from tests.reference import for_each, raises_line
from xformer import ops
from xformer.backends import to_host
from xformer.errors import ShapeError
from xformer.ops import dropout

SHAPES = [(3, 5, 7), (1,), (), (0, 4), (2, 3000), (64,)]


@for_each("dtype", DTYPES)
@for_each("shape", SHAPES)
def test_dropout(cuda, dtype, shape):
    keep = np.asarray(np.random.default_rng(3).random(shape) < 0.7)
    assert cuda.served("dropout", cuda.array(normal(*shape), dtype), cuda.array(keep), keep_probability=0.7)
    cuda.agree(functools.partial(dropout, keep_probability=0.7), normal(*shape), keep, dtype=dtype)


def test_masks_of_any_layout(cuda):
    x, keep = normal(6, 16), np.random.default_rng(3).random((16, 6)) < 0.5
    got = dropout(cuda.array(x), cuda.array(keep).T, 0.5)
    np.testing.assert_array_equal(to_host(got), np.where(keep.T, 2.0 * x, 0.0))


def test_other_masks(cuda):
    """The function broadcasts a mask; the operation takes one of the shape of x."""
    x, keep = cuda.array(normal(2, 3)), np.asarray([[True], [False]])
    np.testing.assert_array_equal(to_host(dropout(x, cuda.array(keep), 0.5)), np.where(keep, 2.0 * normal(2, 3), 0.0))
    for mask, match in [
        (keep, r"dropout got x of shape \(2, 3\) and mask of shape \(2, 1\)"),
        (np.ones((2, 3), np.int64), "dropout got mask of dtype int64; expected bool"),
    ]:
        with raises_line(ShapeError, match):
            ops.explain("dropout", x, cuda.array(mask), keep_probability=0.5)


@for_each("dtype", DTYPES)
def test_infinities_and_nan(cuda, dtype):
    x = cuda.array([1.0, -2.0, np.nan, np.inf, -np.inf, -0.0], dtype)
    keep = cuda.array([True, True, False, False, True, False])
    np.testing.assert_array_equal(to_host(dropout(x, keep, 0.5)), [2.0, -4.0, 0.0, 0.0, -np.inf, 0.0])
