"""Attention on NumPy: values and gradients equal those of the portable definition."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.ops.numpy_cases import (
    BATCH,
    DTYPES,
    HEAD_DIM,
    HEADS,
    LENGTHS,
    MASKS,
    assert_same,
    assert_selected,
    heads,
    make_mask,
    normal,
)
from xformer.ops import attention
from xformer.ops.attention import numpy as numpy_attention

pytestmark = pytest.mark.usefixtures("no_native")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("causal", "drop"), [(False, True), (True, False)])
def test_attention(monkeypatch, dtype, lengths, mask, causal, drop):
    queries, keys = lengths
    arrays = heads(queries, HEAD_DIM, dtype, 1), heads(keys, HEAD_DIM, dtype, 2), heads(keys, 4, dtype, 3)
    mask_array = make_mask(mask, queries, keys)
    keep = np.random.default_rng(6).random((BATCH, HEADS, queries, keys)) < 0.8 if drop else None
    static = {"causal": causal, "keep_probability": 0.8 if drop else 1.0}
    assert_selected("attention", *arrays, mask_array, None, keep, scale=0.5, **static)
    attend = functools.partial(attention, mask=mask_array, dropout_mask=keep, **static)
    assert_same(monkeypatch, attend, *arrays)
    monkeypatch.setattr(numpy_attention, "_TILE_SCORES", 1)  # one head of one sentence per tile
    assert_same(monkeypatch, attend, *arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(BATCH, HEADS, 4, 6), (HEADS, 4, 6), (1, HEADS, 1, 6), (4, 1)], ids=str)
@pytest.mark.parametrize("mask", ["none", "padding", "some rows masked"])
def test_attention_with_a_bias(monkeypatch, dtype, shape, mask):
    arrays = heads(4, HEAD_DIM, dtype, 1), heads(6, HEAD_DIM, dtype, 2), heads(6, 4, dtype, 3)
    bias, mask_array = normal(*shape, seed=4).astype(dtype), make_mask(mask, 4, 6)
    assert_selected("attention", *arrays, mask_array, bias, None, scale=0.5, causal=True, keep_probability=1.0)
    for causal in (False, True):
        attend = functools.partial(attention, mask=mask_array, causal=causal)
        assert_same(monkeypatch, lambda q, k, v, b, f=attend: f(q, k, v, bias=b), *arrays, bias)
    one = arrays[0][:, :, :1]
    if shape[-2] == 1:
        assert_same(monkeypatch, lambda q, k, v, b: attention(q, k, v, bias=b), one, *arrays[1:], bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_strided_arrays_and_of_an_empty_batch(monkeypatch, dtype):
    query, key, value = (normal(BATCH, HEADS, 6, HEAD_DIM, seed=i).astype(dtype) for i in range(3))
    assert_same(monkeypatch, attention, query, key, value)
    assert_same(monkeypatch, attention, query[..., ::-1], key[:, :, ::2], value[:, :, ::2])
    assert_same(monkeypatch, attention, query[:0], key[:0], value[:0])
    assert_same(monkeypatch, lambda q, k, v: attention(q, k, v, scale=3.0, causal=True), 40.0 * query, key, value)


@pytest.mark.parametrize(
    ("batch", "heads", "scores"), [(32, 8, 600), (3, 8, 512 * 512), (1, 1, 10**7), (5, 3, 40_000), (2, 2, 0), (0, 4, 9)]
)
def test_tiles_cover_every_head_once(batch, heads, scores):
    counts = np.zeros((batch, heads), dtype=int)
    for rows, columns in numpy_attention.tiles(batch, heads, scores, 98_304):
        counts[rows, columns] += 1
        size = counts[rows, columns].size * scores
        assert size <= 2 * 98_304 or counts[rows, columns].size == 1
    assert (counts == 1).all()
