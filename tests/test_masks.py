"""Masks: one convention, True = may attend."""

from __future__ import annotations

import numpy as np

from tests.conftest import assert_close, library_or_skip
from tests.reference import for_each, raises_line
from xformer import masks
from xformer.backends import from_host
from xformer.errors import BackendError, ShapeError


def test_padding(xp):
    mask = masks.padding(from_host(xp, [[5, 1, 7], [5, 7, 7]]), 7)
    assert_close(mask, np.asarray([[[[True, True, False]]], [[[True, False, False]]]]), xp=xp)


@for_each(
    "queries, keys, expected",
    [
        (3, None, [[1, 0, 0], [1, 1, 0], [1, 1, 1]]),
        (2, 4, [[1, 1, 1, 0], [1, 1, 1, 1]]),
        (1, 3, [[1, 1, 1]]),
        (3, 1, [[0], [0], [1]]),
        (0, 2, np.zeros((0, 2))),
    ],
)
def test_causal_masks_let_the_last_query_see_the_last_key(queries, keys, expected):
    assert_close(masks.causal(queries, keys, xp="numpy"), np.asarray(expected, dtype=bool))


def test_causal_in_every_library(xp):
    assert_close(masks.causal(2, 3, xp=xp), np.asarray([[True, True, False], [True, True, True]]), xp=xp)


def test_combine(xp):
    padding, causal = masks.padding(from_host(xp, [[1, 0, 2]]), 0), masks.causal(3, xp=xp)
    expected = np.asarray([[[[True, False, False], [True, False, False], [True, False, True]]]])
    assert_close(masks.combine(padding, None, causal), expected, xp=xp)
    assert masks.combine(None, None) is None
    assert masks.combine(None, causal) is causal


@for_each("dtype", ["bool", "int64", "float32"])
def test_the_opposite_convention_is_converted(xp, dtype):
    blocked = from_host(xp, np.asarray([[0, 1, 1]], dtype=dtype))
    assert_close(masks.from_blocked(blocked), np.asarray([[True, False, False]]), xp=xp)


def test_tokens_that_are_none_are_refused():
    with raises_line(ShapeError, r"tokens have shape \(3,\) and dtype int64; expected integers of shape"):
        masks.padding(np.asarray([1, 2, 3]), 0)
    with raises_line(ShapeError, r"tokens have shape \(1, 2\) and dtype float64; expected integers"):
        masks.padding(np.asarray([[1.0, 2.0]]), 0)
    with raises_line(BackendError, r"got a builtins\.list; expected an array of numpy"):
        masks.padding([[1, 2]], 0)
    with raises_line(BackendError, "backend 'tensorflow' is unknown; expected one of numpy"):
        masks.causal(3, xp="tensorflow")


def test_masks_of_two_libraries_are_not_a_matter_of_shapes():
    torch = library_or_skip("torch")
    with raises_line(BackendError, "arrays of numpy and torch were mixed"):
        masks.combine(np.ones((2, 2), dtype=bool), torch.ones((2, 2), dtype=torch.bool))
