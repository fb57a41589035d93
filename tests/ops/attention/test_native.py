"""Attention in the native library: values and gradients equal those of the portable definition."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.ops.native_cases import kernels, needs_library, single  # noqa: F401
from tests.ops.numpy_cases import LENGTHS, MASKS, assert_same, heads, make_mask
from tests.reference import for_each
from xformer import native, ops, vjp
from xformer.errors import ShapeError
from xformer.ops import attention

pytestmark = needs_library

PLAIN = {"causal": False, "scale": 0.3, "keep_probability": 1.0}


def assert_served(*arrays, **static):
    assert ": native.attention" in ops.explain("attention", *arrays, **static)


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


@for_each("seed", range(20))
def test_any_sizes(monkeypatch, seed):
    """Grouped heads, and masks, biases and dropout masks of any shape that broadcasts."""
    rng = np.random.default_rng(seed)
    batch, shared, group = rng.integers(1, 4, size=3)
    queries, keys, features, width = rng.integers(1, 71, size=4)
    queries = min(queries, 9) if seed % 2 else queries
    shape = batch, shared * group, queries, keys
    arrays = [
        single(batch, count, *sizes, seed=seed)
        for count, *sizes in ((shape[1], queries, features), (shared, keys, features), (shared, keys, width))
    ]

    def broadcastable():
        return [size if rng.random() < 0.6 else 1 for size in shape][rng.integers(0, 3) :]

    mask, keep = (rng.random(broadcastable()) < 0.7 if rng.random() < 0.5 else None for _ in range(2))
    bias = single(*broadcastable()[:-1], keys, seed=seed)  # one number for all keys would have no gradient
    static = {"causal": bool(seed % 3), "dropout_mask": keep, "keep_probability": 0.7}
    assert_same(monkeypatch, lambda q, k, v, b: attention(q, k, v, mask, b, **static), *arrays, bias)
    assert_same(monkeypatch, functools.partial(attention, mask=mask, **static), *arrays)


def test_strided_arrays_and_empty_ones(monkeypatch):
    query, key, value = (single(3, 2, 6, 7, seed=i) for i in range(3))
    assert_same(monkeypatch, attention, query[..., ::-1], key[:, :, ::2], value[:, :, ::2])
    assert_same(monkeypatch, lambda q, k, v: attention(q, k, v, scale=1.0, causal=True), 5.0 * query, key, value)
    mask = np.ones((6, 12), bool)
    mask[:, ::4] = False
    assert_same(monkeypatch, lambda q, k, v: attention(q, k, v, mask[:, ::2]), query, key, value)
    for rows in (query[:0], key[:0], value[:0]), (query[:, :, :0], key, value), (query, key[:, :, :0], value[:, :, :0]):
        assert_served(*rows, None, None, None, **PLAIN)
        assert_same(monkeypatch, attention, *rows)
    assert_same(monkeypatch, attention, query, key, value[..., :0])
    assert_same(monkeypatch, attention, query[..., :0], key[..., :0], value)


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


@for_each("queries", [1, 8, 70])
def test_nan_in_a_visible_key_reaches_exactly_the_queries_that_see_it(queries):
    query, key, value = (single(1, 1, length, 5, seed=length) for length in (queries, 70, 70))
    key[:, :, 69] = np.nan
    y = attention(query, key, value, causal=True)
    assert np.isnan(y[0, 0, -1]).all()
    assert np.isfinite(y[0, 0, :-1]).all()
    bias = np.zeros((70,), "float32")
    bias[69] = -np.inf
    assert np.isnan(attention(query, key, value, bias=bias)).all()  # a bias is no mask
    np.testing.assert_array_equal(np.isnan(attention(query, key, value, np.arange(70) < 69)), False)


@for_each("queries", [3, 80])
def test_infinite_scores_are_nan(queries):
    query, key, value = (np.full((1, 1, length, 5), 1e30, "float32") for length in (queries, 20, 20))
    assert np.isnan(attention(query, key, value)).all()
    np.testing.assert_array_equal(attention(query, -key, value), 0.0)


def test_the_number_of_threads_does_not_change_the_bits(monkeypatch):
    arrays, results = [single(3, 3, 150, 16, seed=seed) for seed in range(3)], []
    for threads in ("1", *["3"] * 20):
        monkeypatch.setenv("XFORMER_NUM_THREADS", threads)
        output, pull = vjp(attention, *arrays)
        results.append([output, *pull(np.cos(output)), attention(arrays[0][:, :, :1], *arrays[1:])])
    for others in results[1:]:
        for one, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(one, other)


LEVEL = """
import hashlib, numpy as np
from xformer import native, vjp
from xformer.ops import attention
digest, rng = hashlib.sha256(), np.random.default_rng(0)
for queries, keys, features, width in ((1, 70, 17, 20), (5, 70, 32, 33), (70, 150, 7, 48), (130, 40, 64, 5)):
    shapes = (2, 4, queries, features), (2, 2, keys, features), (2, 2, keys, width), (4, queries, keys)
    arrays = [rng.normal(size=shape).astype("float32") for shape in shapes]
    output, pull = vjp(lambda q, k, v, b: attention(q, k, v, b > -1.0, b, causal=True), *arrays)
    for result in (attention(*arrays[:3]), output, *pull(output)):
        digest.update(np.ascontiguousarray(result).tobytes())
print(native.level(), digest.hexdigest())
"""


def test_vectors_of_any_length_give_the_same_bits():
    """Without an instruction that multiplies and adds, bits differ: the level "baseline" is compared elsewhere."""
    digests = {}
    for level in ("avx2", "avx512"):
        environment = {**os.environ, "XFORMER_NATIVE": level, "XFORMER_KERNELS": "auto"}
        result = subprocess.run([sys.executable, "-c", LEVEL], env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        ran, _, digest = result.stdout.strip().rpartition(" ")
        if ran == level:  # else this processor has no such instructions
            digests[level] = digest
    assert len(set(digests.values())) <= 1


@for_each("level", ["baseline", "avx2"])
def test_other_levels_equal_the_definition(level):
    """Run two tests of this file with the instructions of older processors."""
    selected = "test_any_sizes or test_nan"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", selected, __file__]
    environment = {**os.environ, "XFORMER_NATIVE": level}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode in (0, 5), result.stdout  # 5: all skipped


def empty(*shape, dtype="float32"):
    return np.empty(shape, dtype)


@for_each(
    "place, wrong",
    [
        (0, empty(2, 4, 5, 3, dtype="float64")),
        (0, empty(2, 4, 5, 4)),
        (0, empty(2, 3, 5, 3)),
        (1, empty(2, 2, 8, 3)),
        (1, empty(4, 7, 3)),
        (2, empty(2, 2, 6, 6)),
        (2, None),
        (3, empty(2, 1, 1, 6, dtype="bool")),
        (3, empty(2, 1, 1, 7)),
        (4, empty(1, 2, 1, 1, 7)),
        (5, empty(3, 4, 5, 7, dtype="bool")),
        (6, empty(2, 4, 4, 6)),
        (7, empty(2, 2, 4, 4)),
        (7, None),
        (8, empty(2, 4, 5, 5)),
        (9, empty(2, 2, 5, 3)),
        (10, empty(2, 4, 7, 3)),
        (11, empty(2, 2, 7, 5)),
        (12, empty(2, 4, 1, 7)),
    ],
)
def test_the_library_refuses_arrays_that_do_not_fit(place, wrong):
    shapes = (2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 6)
    query, key, value = (empty(*shape) for shape in shapes)
    arrays = [query, key, value, None, None, None, empty(2, 4, 5, 6), empty(2, 2, 4, 5)]
    arrays += [empty(2, 4, 5, 6), *map(np.empty_like, (query, key, value)), empty(2, 4, 5, 7)]
    native.call("attention_vjp", tuple(np.zeros_like(x) if x is not None else None for x in arrays))
    arrays[place] = wrong
    with pytest.raises(ShapeError, match=r"^attention_vjp: "):
        native.call("attention_vjp", tuple(arrays))
    if place < 8 and wrong is not None:
        with pytest.raises(ShapeError, match=r"^attention: "):
            native.call("attention", tuple(arrays[:8]))
