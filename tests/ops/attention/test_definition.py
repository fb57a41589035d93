"""The attention operation: fully masked rows and invalid shapes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import for_each, normal, raises_line, weighted_sum
from xformer import value_and_grad
from xformer.backends import from_host, to_host
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.ops import attention, attention_weights, softmax

QUERY, KEY, VALUE = normal(0, 2, 2, 3, 4), normal(1, 2, 2, 5, 4), normal(2, 2, 2, 5, 6)
MASK = np.ones((2, 1, 3, 5), dtype=bool)
MASK[0, :, 1, :] = False  # the second query of the first sentence may attend nowhere
MASK[1, :, :, 3:] = False


@pytest.mark.parametrize("mode", ["auto", "portable"])
def test_fully_masked_rows_give_zeros_and_zero_gradients(xp, mode, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    arrays = [from_host(xp, array) for array in (QUERY, KEY, VALUE)]
    mask, g = from_host(xp, MASK), from_host(xp, normal(3, 2, 2, 3, 6))
    assert not to_host(attention_weights(*arrays[:2], mask))[0, :, 1].any()
    assert not to_host(attention(*arrays, mask))[0, :, 1].any()
    loss, gradients = value_and_grad(lambda arrays: weighted_sum(attention(*arrays, mask), g))(arrays)
    dquery, dkey, dvalue = map(to_host, gradients)
    assert np.isfinite(to_host(loss))
    assert all(np.isfinite(array).all() for array in (dquery, dkey, dvalue))
    assert not dquery[0, :, 1].any()
    assert dquery[0, :, 0].any()
    assert not dkey[1, :, 3:].any()
    assert not dvalue[1, :, 3:].any()
    # What the closed row has no part in is what it would be without the row.
    rows = [0, 2]
    _, others = value_and_grad(
        lambda arrays: weighted_sum(attention(*arrays, MASK[:1, :, rows]), normal(3, 2, 2, 3, 6)[:1, :, rows])
    )([QUERY[:1, :, rows], KEY[:1], VALUE[:1]])
    np.testing.assert_allclose(dkey[:1], others[1], atol=1e-12)
    np.testing.assert_allclose(dvalue[:1], others[2], atol=1e-12)


def test_native_autograd_of_fully_masked_rows_gives_no_nan():
    torch = library_or_skip("torch")
    arrays = [torch.tensor(array, requires_grad=True) for array in (QUERY, KEY, VALUE)]
    attention(*arrays, torch.tensor(MASK)).sum().backward()
    assert all(bool(torch.isfinite(array.grad).all()) for array in arrays)
    assert not arrays[0].grad[0, :, 1].any()


@pytest.mark.parametrize("mode", ["auto", "portable"])
def test_causal_composes_with_a_mask_and_is_aligned_at_the_end(mode, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    allowed = np.tril(np.ones((3, 5), dtype=bool), k=2)
    expected = attention(QUERY, KEY, VALUE, MASK & allowed)
    assert_close(attention(QUERY, KEY, VALUE, MASK, causal=True), expected)
    assert_close(attention(QUERY, KEY, VALUE, causal=True), attention(QUERY, KEY, VALUE, allowed))


def test_the_scale_is_an_argument():
    assert_close(attention(QUERY, KEY, VALUE), attention(QUERY, KEY, VALUE, scale=0.5))
    assert_close(
        attention(QUERY, KEY, VALUE, scale=0.0), np.broadcast_to(VALUE.mean(axis=2, keepdims=True), (2, 2, 3, 6))
    )


def test_large_scores_do_not_overflow(xp):
    scores = from_host(xp, np.asarray([[1e4, 1e4 - 1.0, -1e4]]))
    expected = np.asarray([[1.0, np.exp(-1.0), 0.0]]) / (1.0 + np.exp(-1.0))
    assert_close(softmax(scores), expected, xp=xp)


@for_each(
    "shapes",
    [
        ((2, 2, 3, 4), (2, 2, 5, 3), (2, 2, 5, 6)),
        ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 4, 6)),
        ((2, 2, 3, 4), (3, 2, 5, 4), (3, 2, 5, 6)),
        ((2, 2, 3, 4), (2, 5, 4), (2, 5, 6)),
        ((4,), (4,), (4,)),
    ],
)
def test_shapes_that_do_not_match_are_refused(shapes):
    with raises_line(ShapeError, r"^attention got .*\(.*; expected .*\(.*(head_dim|value_dim)\)"):
        attention(*map(np.zeros, shapes))


def test_arrays_on_two_devices_are_refused():
    strict = pytest.importorskip("array_api_strict", reason="has devices to test with")
    here, there = strict.ones((1, 2, 3, 4)), strict.Device("device1")
    message = r"^arrays on different devices were mixed: .*; move one over"
    with pytest.raises(BackendError, match=message):
        attention(here, here, here, strict.ones((3, 3), dtype=strict.bool, device=there))
    with pytest.raises(BackendError, match=message):
        attention(here, here.to_device(there), here.to_device(there))
    assert attention(*(here.to_device(there) for _ in range(3))).device == there


@pytest.mark.parametrize("mode", ["auto", "portable"])
@pytest.mark.parametrize(("queries", "shared"), [(1, 2), (3, 1), (3, 2)])
@pytest.mark.parametrize("of_heads", [False, True])
def test_shared_keys_equal_repeated_keys(xp, mode, queries, shared, of_heads, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    arrays = [normal(0, 2, 4, queries, 8), normal(1, 2, shared, 5, 8), normal(2, 2, shared, 5, 6)]
    bias, mask = normal(3, 4 if of_heads else 1, 1, 5), from_host(xp, MASK[:, :, -1:])
    settings = {"mask": mask, "bias": from_host(xp, bias), "causal": True}
    g = normal(4, 2, 4, queries, 6)

    def of_shared(arrays):
        return weighted_sum(attention(*arrays, **settings), from_host(xp, g))

    result, gradients = value_and_grad(of_shared)([from_host(xp, array) for array in arrays])
    own = [arrays[0], *(np.repeat(array, 4 // shared, axis=1) for array in arrays[1:])]
    reference, (dquery, *others) = value_and_grad(of_shared)([from_host(xp, array) for array in own])
    sums = [to_host(x).reshape(2, shared, 4 // shared, *x.shape[2:]).sum(axis=2) for x in others]
    assert_close(result, reference, xp=xp)
    for actual, expected in zip(gradients, [to_host(dquery), *sums], strict=True):
        assert_close(actual, expected, xp=xp)


@for_each("queries", [1, 3])
def test_heads_of_keys_must_divide_those_of_the_query(queries):
    with pytest.raises(ShapeError, match="expected heads to be a multiple of kv_heads"):
        attention(normal(0, 2, 4, queries, 8), normal(1, 2, 3, 5, 8), normal(2, 2, 3, 5, 6))


@pytest.mark.parametrize("mode", ["auto", "no-native", "portable"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_keys_equal_fully_masked_keys(xp, mode, dtype, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    arrays = [from_host(xp, normal(0, 2, 4, *shape), dtype=dtype) for shape in [(3, 8), (0, 8), (0, 6)]]
    g = from_host(xp, normal(3, 2, 4, 3, 6), dtype=dtype)
    output = attention(*arrays)
    loss, gradients = value_and_grad(lambda arrays: weighted_sum(attention(*arrays), g))(arrays)
    assert output.shape == (2, 4, 3, 6)
    assert not to_host(output).any()
    assert not to_host(loss).any()
    assert [tuple(x.shape) for x in gradients] == [tuple(x.shape) for x in arrays]
    assert not to_host(gradients[0]).any()


@pytest.mark.parametrize("mode", ["auto", "no-native", "portable"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("low", [-1e30, np.finfo("float32").min, -np.inf])
def test_large_negative_biases_mean_the_same_in_all_kernels(mode, queries, low, monkeypatch):
    """Hugging Face masks keys by the lowest float; a row of them is averaged, and one of infinities is zero."""
    query, key, value = (normal(seed, 2, 2, size, 8).astype("float32") for seed, size in enumerate((queries, 5, 5)))
    bias = np.zeros((2, 1, queries, 5), "float32")
    bias[0], bias[1, :, :, 3:] = low, low
    g = normal(3, 2, 2, queries, 8).astype("float32")
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    output = attention(query, key, value, bias=bias)
    expected = 0.0 if low == -np.inf else value[0].mean(axis=1, keepdims=True)
    np.testing.assert_allclose(output[0], np.broadcast_to(expected, output[0].shape), atol=1e-6)
    np.testing.assert_allclose(output[1], attention(query[1:], key[1:, :, :3], value[1:, :, :3])[0], atol=1e-6)
    _, gradients = value_and_grad(lambda arrays: weighted_sum(attention(*arrays, bias=bias), g))([query, key, value])
    mean = 0.0 if low == -np.inf else g[0].sum(axis=1, keepdims=True) / 5
    np.testing.assert_allclose(gradients[2][0], np.broadcast_to(mean, gradients[2][0].shape), atol=1e-5)


@pytest.mark.parametrize("mode", ["auto", "no-native", "portable"])
@pytest.mark.parametrize("queries", [1, 3, 130])
def test_masked_keys_may_be_nan(mode, queries, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    query, key, value = (normal(seed, 2, 2, size, 8).astype("float32") for seed, size in enumerate((queries, 130, 130)))
    mask = np.ones((2, 1, 1, 130), dtype=bool)
    mask[:, :, :, 100:] = False
    expected = attention(query, key, value, mask)
    key[:, :, 100:] = np.nan
    np.testing.assert_allclose(attention(query, key, value, mask), expected, atol=1e-6)


@for_each("softcap", [0, -1.0, float("nan")])
def test_a_softcap_must_be_positive(softcap):
    x = normal(1, 2, 3, 4)
    for call in (lambda: attention(x, x, x, softcap=softcap), lambda: attention_weights(x, x, softcap=softcap)):
        with raises_line(ConfigError, "^softcap is .*; expected a number above 0$"):
            call()


@for_each("value", [0, 0.0, -0.5, 1.5, "0.5", float("nan")])
def test_a_keep_probability_must_be_above_zero_and_at_most_one(value):
    x = normal(1, 2, 3, 4)
    with raises_line(ConfigError, f"^keep_probability is {value!r}; expected a number in \\(0, 1\\]$"):
        attention(x, x, x, dropout_mask=np.ones((2, 3, 3), dtype=bool), keep_probability=value)
