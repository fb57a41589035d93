"""Softmax of the native library: values and derivatives equal those of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.native_cases import (
    SIZES,
    SPECIAL,
    assert_precise,
    assert_selected,
    kernels,  # noqa: F401
    needs_library,
    single,
)
from tests.ops.numpy_cases import LAYOUTS, assert_same, with_layout
from xformer import vjp
from xformer.ops import softmax

pytestmark = needs_library


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(monkeypatch, layout):
    x = with_layout(layout, "float32")
    assert_selected("softmax", x, None)
    assert_same(monkeypatch, softmax, x)


def masks(shape):
    """Return masks of all strides: contiguous, transposed, every other element, and broadcast axes."""
    rng = np.random.default_rng(5)
    mask = rng.random(shape) < 0.6
    yield mask
    yield mask.T.copy().T
    yield (rng.random((*shape[:-1], 2 * shape[-1])) < 0.6)[..., ::2]
    yield mask[..., :1]
    yield mask[0]
    yield mask[:, :1, ::-1]
    yield np.zeros((1, 1, 1), bool)


@pytest.mark.parametrize("size", [1, 5, 16, 37, 70])
def test_masks(monkeypatch, size):
    x = 5.0 * single(3, 4, size)
    for mask in masks(x.shape):
        assert_selected("softmax", x, mask)
        assert_same(monkeypatch, lambda x, mask=mask: softmax(x, mask), x)


@pytest.mark.parametrize("rows", [1, 3, 300])
def test_sizes(rows):
    for classes in [*SIZES, 20_011]:
        assert_precise(softmax, 5.0 * single(rows, classes), tolerance=2e-6)


def test_arrays_without_elements():
    for shape in [(0,), (3, 0), (0, 5)]:
        output, pull = vjp(softmax, single(*shape))
        assert output.shape == pull(output)[0].shape == shape


def test_masked_values_are_ignored_and_masked_rows_are_zero():
    x = single(3, 40)
    x[0, ::2], x[2] = np.nan, np.inf
    keep = np.ones((3, 40), bool)
    keep[0, ::2], keep[2] = False, False
    output, pull = vjp(lambda x: softmax(x, keep), x)
    (dx,) = pull(single(3, 40, seed=1))
    np.testing.assert_allclose(output.sum(axis=-1), [1.0, 1.0, 0.0], rtol=1e-6)
    assert not output[~keep].any()
    assert not dx[~keep].any()


@pytest.mark.parametrize("place", [0, 17, 39])
@pytest.mark.parametrize("special", SPECIAL)
def test_special_scores(special, place):
    x = single(3, 40)
    x[1, place] = special
    assert_precise(softmax, x, tolerance=2e-6)
