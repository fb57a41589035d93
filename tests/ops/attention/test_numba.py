"""Compiled attention: values and gradients equal those of the portable definition, for whole and partial tiles."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.ops._numba.test_thread_pool import awake, helped
from tests.ops.numpy_cases import LENGTHS, MASKS, assert_same, heads, make_mask, normal
from xformer import ops, vjp
from xformer.ops import attention
from xformer.ops._numba import thread_pool as thread_pool
from xformer.ops.attention import numba as numba_attention

pytest.importorskip("numba")

from xformer.ops._numba import microkernel


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Enable the kernel."""
    monkeypatch.setenv("XFORMER_KERNELS", "auto")


PLAIN = {"causal": False, "scale": 0.3, "keep_probability": 1.0}


def single(*shape, seed=0):
    return normal(*shape, seed=seed).astype("float32")


def assert_served(*arrays, **static):
    assert ": numba.attention" in ops.explain("attention", *arrays, **static)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("causal", "drop"), [(False, True), (True, False)])
def test_short_sequences(monkeypatch, lengths, mask, causal, drop):
    queries, keys = lengths
    arrays = heads(queries, 7, "float32", 1), heads(keys, 7, "float32", 2), heads(keys, 4, "float32", 3)
    allowed = make_mask(mask, queries, keys)
    keep = np.random.default_rng(6).random((3, 2, queries, keys)) < 0.8 if drop else None
    static = {"causal": causal, "keep_probability": 0.8 if drop else 1.0}
    assert_served(*arrays, allowed, None, keep, scale=0.5, **static)
    assert_same(monkeypatch, functools.partial(attention, mask=allowed, dropout_mask=keep, **static), *arrays)


@pytest.mark.parametrize("lengths", [(64, 128), (65, 129), (130, 100), (100, 300), (200, 130)], ids=str)
@pytest.mark.parametrize("features", [8, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_sequences_of_several_tiles(monkeypatch, lengths, features, causal):
    queries, keys = lengths
    arrays = [single(1, 2, length, features, seed=length) for length in (queries, keys, keys)]
    mask = np.random.default_rng(3).random((1, 1, queries, keys)) < 0.6
    mask[:, :, 1:70] = False  # these rows are fully masked
    assert_served(*arrays, mask, None, None, causal=causal, scale=1.0, keep_probability=1.0)
    assert_same(monkeypatch, functools.partial(attention, causal=causal), *arrays)
    assert_same(monkeypatch, functools.partial(attention, causal=causal, mask=mask), *arrays)


@pytest.mark.parametrize("shape", [(3, 2, 70, 140), (2, 70, 140), (1, 2, 1, 140), (3, 1, 1, 140), (70, 1), ()], ids=str)
@pytest.mark.parametrize(("mask", "causal"), [(False, True), (True, False)])
def test_a_bias(monkeypatch, shape, mask, causal):
    arrays = [single(3, 2, length, 5, seed=length) for length in (70, 140, 140)]
    allowed = np.random.default_rng(3).random((3, 1, 1, 140)) < 0.6 if mask else None
    bias, attend = np.asarray(single(*shape, seed=4)), functools.partial(attention, causal=causal)
    assert_served(*arrays, allowed, bias, None, causal=causal, scale=1.0, keep_probability=1.0)
    assert_same(monkeypatch, lambda q, k, v, b: attend(q, k, v, allowed, b), *arrays, bias)


def test_strided_arrays_and_an_empty_batch(monkeypatch):
    query, key, value = (single(3, 2, 6, 7, seed=i) for i in range(3))
    assert_same(monkeypatch, attention, query[..., ::-1], key[:, :, ::2], value[:, :, ::2])
    assert_same(monkeypatch, attention, query[:0], key[:0], value[:0])
    assert_same(monkeypatch, lambda q, k, v: attention(q, k, v, scale=1.0, causal=True), 5.0 * query, key, value)


def test_few_queries_with_a_preallocated_cache(monkeypatch):
    cache = [single(3, 2, 50, 8, seed=seed)[:, :, :41] for seed in (1, 2)]
    query, mask = single(3, 2, 1, 8), np.random.default_rng(3).random((3, 1, 1, 41)) < 0.6
    mask[1] = False
    few = single(3, 2, 4, 8, seed=3)
    assert_served(few, *cache, mask, None, None, **PLAIN)
    assert_same(monkeypatch, functools.partial(attention, mask=mask), few, *cache)
    assert_same(monkeypatch, functools.partial(attention, causal=True), few, *cache)
    for arrays in ((query, *cache), (query[..., ::-1], *(x[..., ::-1] for x in cache))):
        assert_served(*arrays, mask, None, None, **PLAIN)
        assert_same(monkeypatch, functools.partial(attention, causal=True, mask=mask), *arrays)


def test_large_scores_give_finite_results():
    query = 1e4 * single(1, 1, 80, 16)
    output, pull = vjp(attention, query, query, single(1, 1, 80, 16, seed=2))
    assert np.isfinite(output).all()
    assert all(np.isfinite(cotangent).all() for cotangent in pull(np.ones_like(output)))


def test_the_number_of_threads_does_not_change_the_bits(monkeypatch):
    monkeypatch.setattr(thread_pool, "_MIN_MULTIPLICATIONS", 1)
    arrays, results = [single(3, 3, 70, 16, seed=seed) for seed in range(3)], []
    for threads in (1, 3):
        monkeypatch.setenv("XFORMER_NUM_THREADS", str(threads))
        shared = []
        for _ in range(2000 if threads > 1 else 1):
            awake(threads - 1)
            output, pull = vjp(attention, *arrays)
            results.append([output, *pull(np.cos(output)), attention(arrays[0][:, :, :1], *arrays[1:])])
            shared.append(threads > 1 and helped())
            if shared[-1]:
                break
        assert any(shared) == (threads > 1)
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("features", "width"), [(1, 1), (17, 49), (256, 3), (5, 256)])
def test_heads_of_any_size(monkeypatch, features, width):
    arrays = single(1, 2, 19, features), single(1, 2, 103, features, seed=1), single(1, 2, 103, width, seed=2)
    assert_served(*arrays, None, None, None, **PLAIN)
    assert_same(monkeypatch, attention, *arrays)


def test_larger_heads_are_not_supported():
    assert numba_attention._MAX_FEATURES <= microkernel.DEPTH
    query = single(1, 1, 3, 257)
    assert "not numba.attention: head_dim above 256" in ops.explain(
        "attention", query, query, query, None, None, None, **PLAIN
    )
    assert attention(query, query, query).shape == query.shape
