"""Embeddings of the native library: values and derivatives equal those of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ops.native_cases import SIZES, assert_selected, kernels, needs_library, single  # noqa: F401
from tests.ops.numpy_cases import assert_same
from xformer import native, vjp
from xformer.ops import embedding

pytestmark = needs_library


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_ids(monkeypatch, dtype, scale):
    rng = np.random.default_rng(0)
    for shape in [(3, 5), (), (0, 3), (6, 5)]:
        weight, ids = single(9, 7), rng.integers(0, 9, shape).astype(dtype)
        ids = ids[::2].T if shape == (6, 5) else ids
        assert_selected("embedding", weight, ids, scale=scale)
        assert_same(monkeypatch, lambda w, ids=ids: embedding(w, ids, scale=scale), weight)


def test_layouts(monkeypatch):
    ids = np.random.default_rng(0).integers(0, 9, 30)
    for weight in (single(7, 9).T, single(9, 14)[:, ::2], single(9, 7)[::-1]):
        assert_same(monkeypatch, lambda w: embedding(w, ids), weight)


def test_sizes_and_repeated_ids():
    for features in [0, *SIZES]:
        ids = np.random.default_rng(features).integers(0, 5, 200)
        weight, g = single(9, features), single(200, features, seed=1)
        expected = np.zeros(weight.shape)
        np.add.at(expected, ids, g.astype("float64"))
        output, pull = vjp(lambda w, ids=ids: embedding(w, ids), weight)
        np.testing.assert_array_equal(output, weight[ids])
        np.testing.assert_allclose(pull(g)[0], expected, rtol=0.0, atol=2e-5)


def test_special_cotangents_stay_in_their_row():
    g = single(3, 20)
    g[1, 3] = np.nan
    _, pull = vjp(lambda w: embedding(w, np.asarray([0, 2, 0])), single(4, 20))
    np.testing.assert_array_equal(np.argwhere(np.isnan(pull(g)[0])), [[2, 3]])


@pytest.mark.parametrize("wrong", [-1, 9, 2**62])
def test_ids_out_of_range_write_nothing(wrong):
    target = np.zeros((9, 7), "float32")
    with pytest.raises(IndexError, match="an index is out of range"):
        native.call("add_rows", (single(2, 7), np.asarray([3, wrong]), target), n0=1.0)
    assert not np.delete(target, 3, axis=0).any()
