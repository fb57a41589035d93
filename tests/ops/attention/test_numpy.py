"""Flash attention on NumPy: values and gradients equal those of the portable definition."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each, normal
from xformer import ops
from xformer.kernels import numpy as flash
from xformer.ops.attention import _forward as portable
from xformer.ops.attention import _vjp as portable_vjp

pytestmark = pytest.mark.usefixtures("no_native")
NEEDS = (True, True, True, False, False, False)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(flash, "_MIN_SCORES", 0)
    monkeypatch.setattr(flash, "_QUERIES", 4)
    monkeypatch.setattr(flash, "_KEYS", 6)
    monkeypatch.setattr(flash, "_MIN_GROUPS", 1)  # all heads in one group


def inputs(queries=9, keys=13, dtype="float64", spread=1.0):
    shapes = ((2, 3, queries, 5), (2, 3, keys, 5), (2, 3, keys, 4))
    return [(spread * normal(seed, *shape)).astype(dtype) for seed, shape in enumerate(shapes)]


def both(query, key, value, mask=None, *, causal=False, scale=0.4):
    """Return output and cotangents, by the kernel and by the definition."""
    static = {"causal": causal, "scale": scale, "keep_probability": 1.0}
    arrays = (query, key, value, mask, None, None)
    assert flash._why_not(*arrays, save=True, **static) is None
    g, results = np.cos(np.arange(query.size // query.shape[-1] * value.shape[-1])), []
    for forward, vjp in ((flash._forward, flash._vjp), (portable, portable_vjp)):
        output, residuals = forward(*arrays, save=True, **static)
        cotangents = vjp(g.reshape(output.shape).astype(output.dtype), residuals, NEEDS, **static)
        results.append([output, *cotangents[:3]])
    return results


def assert_equal(results, tolerance):
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(1.0, np.abs(expected).max()))


@for_each("causal", [False, True])
@for_each("queries, keys", [(9, 13), (13, 9), (4, 6), (1, 1), (5, 12), (12, 5), (8, 8)])
@for_each("dtype, tolerance", [("float64", 1e-13), ("float32", 2e-6)])
def test_values_and_derivatives(causal, queries, keys, dtype, tolerance):
    assert_equal(both(*inputs(queries, keys, dtype), causal=causal), tolerance)


@for_each("causal", [False, True])
@for_each("shape", [(2, 1, 1, 13), (1, 1, 13), (13,), (1, 1, 1, 1)])
def test_masks_of_keys(causal, shape):
    mask = np.resize([True, False, True, True, False], shape)
    assert_equal(both(*inputs(), mask, causal=causal), 1e-13)


def test_a_fully_masked_sentence_gives_zeros():
    mask = np.asarray([[True] * 13, [False] * 13]).reshape(2, 1, 1, 13)
    results = both(*inputs(), mask)
    assert not results[0][0][1].any()
    assert_equal(results, 1e-13)


def test_masked_keys_do_not_affect_the_result():
    query, key, value = inputs()
    mask = (np.arange(13) < 7).reshape(1, 1, 1, 13)
    results = []
    for padding in (0.0, np.inf, np.nan):
        key[:, :, 7:] = padding
        static = {"causal": False, "scale": 0.4, "keep_probability": 1.0}
        output, residuals = flash._forward(query, key, value, mask, None, None, save=True, **static)
        results.append([output, *flash._vjp(np.cos(output), residuals, NEEDS, **static)[:3]])
    for other in results[1:]:
        for actual, expected in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 1e-4)])
def test_scores_far_below_their_bound(monkeypatch, causal, dtype, tolerance):
    calls, max_scores = [], flash._Heads.max_scores
    monkeypatch.setattr(flash._Heads, "max_scores", lambda self, rows: calls.append(rows) or max_scores(self, rows))
    assert_equal(both(*inputs(dtype=dtype, spread=12.0), causal=causal, scale=1.0), tolerance)
    assert calls


def test_an_empty_batch():
    query, key, value = (x[:0] for x in inputs())
    assert [x.shape for x in both(query, key, value)[0]] == [(0, 3, 9, 4), (0, 3, 9, 5), (0, 3, 13, 5), (0, 3, 13, 4)]


@pytest.mark.parametrize("threads", ["2", "7"])
def test_the_number_of_threads_does_not_change_the_bits(monkeypatch, threads):
    monkeypatch.setattr(flash, "_MIN_GROUPS", 16)  # one head in each group
    monkeypatch.setenv("XFORMER_NUM_THREADS", threads)
    results = both(*inputs())[0]
    monkeypatch.setenv("XFORMER_NUM_THREADS", "1")
    for actual, expected in zip(results, both(*inputs())[0], strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_the_other_kernel_runs_unsupported_calls(monkeypatch):
    query, key, value = inputs()
    static = {"causal": False, "scale": 1.0, "keep_probability": 1.0}
    explain = lambda *arrays: ops.explain("attention", *arrays, **static)  # noqa: E731
    assert ": numpy.flash_attention" in explain(query, key, value, None, None, None)
    assert "a bias or dropout" in explain(query, key, value, None, np.zeros((1, 1, 9, 13)), None)
    assert "the mask depends on heads or queries" in explain(
        query, key, value, np.ones((9, 13), dtype=bool), None, None
    )
    assert "dtype float16" in explain(*(x.astype("float16") for x in (query, key, value)), None, None, None)
    monkeypatch.setattr(flash, "_MIN_SCORES", 200)
    assert "fewer than 200 scores" in explain(query, key, value, None, None, None)
    assert ops.attention(query, key, value).shape == (2, 3, 9, 4)


@for_each("offset", [1e6, -1e6])
def test_an_offset_of_all_scores_changes_no_derivative(offset):
    """Scores are integers, so float32 holds them exactly, with the offset of their first feature too."""
    generator = np.random.default_rng(0)
    query, key = (generator.integers(-2, 3, (1, 2, 9, 4)).astype(np.float64) for _ in range(2))
    value, g = normal(2, 1, 2, 9, 3), normal(3, 1, 2, 9, 3)
    query[..., 0], key[..., 0] = offset / 1e3, 1e3
    centered = np.concat([0.0 * query[..., :1], query[..., 1:]], axis=-1)

    def attend(*arrays):
        return ops.attention(*arrays, scale=1.0)

    _, pull = xf.vjp(attend, centered, key, value)
    _, pull_shifted = xf.vjp(attend, *(x.astype(np.float32) for x in (query, key, value)))
    for result, expected in zip(pull_shifted(g.astype(np.float32)), pull(g), strict=True):
        np.testing.assert_allclose(result[..., 1:], expected[..., 1:], atol=1e-5)
