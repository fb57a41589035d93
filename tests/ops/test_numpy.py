"""Rowwise operations on NumPy: values and gradients equal those of the portable definitions."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.ops.numpy_cases import (
    DTYPES,
    LABELS,
    LAYOUTS,
    assert_same,
    assert_selected,
    normal,
    with_layout,
)
from xformer import ops, vjp
from xformer.ops import attention, cross_entropy, dropout, embedding, layer_norm, linear, relu
from xformer.ops._numpy import row_blocks

pytestmark = pytest.mark.usefixtures("no_native")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm(monkeypatch, layout, dtype):
    x, weight, bias = with_layout(layout, dtype), normal(7, seed=1).astype(dtype), normal(7, seed=2).astype(dtype)
    assert_selected("layer_norm", x, weight, bias, epsilon=1e-5)
    assert_same(monkeypatch, layer_norm, x, weight, bias)
    assert_same(monkeypatch, lambda x, weight: layer_norm(x, weight, None, epsilon=0.1), x, weight)


def test_blocks_of_very_short_and_very_long_rows():
    assert list(row_blocks(np.empty((3, 0)), num_arrays=3)) == [slice(0, 3)]
    assert list(row_blocks(np.empty((2, 100_000)), num_arrays=3)) == [slice(0, 1), slice(1, 2)]


def test_layer_norm_gradients_of_some_inputs(monkeypatch):
    x, weight, bias = normal(3, 5, 7), normal(7, seed=1), normal(7, seed=2)
    assert_same(monkeypatch, lambda weight: layer_norm(x, weight, bias), weight.copy())
    assert_same(monkeypatch, lambda x: layer_norm(x, weight, bias), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_relu(monkeypatch, layout, dtype):
    assert_selected("relu", with_layout(layout, dtype))
    assert_same(monkeypatch, relu, with_layout(layout, dtype))
    assert_same(monkeypatch, relu, np.zeros((2, 3), dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout(monkeypatch, layout, dtype):
    x = with_layout(layout, dtype)
    keep = np.random.default_rng(3).random(x.shape) < 0.7
    assert_selected("dropout", x, keep, keep_probability=0.7)
    assert_same(monkeypatch, lambda x: dropout(x, keep, 0.7), x)
    assert_same(monkeypatch, lambda x: dropout(x, keep.T.copy().T, 0.7), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_dropped_elements_are_zero_even_if_not_finite(dtype, odd):
    x, keep = np.asarray([1.0, -2.0, 3.0, odd], dtype), np.asarray([True, True, False, False])
    assert_selected("dropout", x, keep, keep_probability=0.5)
    np.testing.assert_array_equal(dropout(x, keep, 0.5), [2.0, -4.0, 0.0, 0.0])
    _, pull = vjp(relu, np.asarray([1.0, 1.0, -1.0, -1.0], dtype))
    np.testing.assert_array_equal(pull(x)[0], [1.0, -2.0, 0.0, 0.0])
    # Elements that are not dropped stay the same.
    np.testing.assert_array_equal(dropout(x[::-1], keep, 1.0), [odd, 3.0, 0.0, 0.0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "ids", [[[3, 1, 3], [0, 3, 10]], [[5]], [[10, 10, 10, 10]], np.zeros((0, 3)), np.zeros((2, 0))]
)
@pytest.mark.parametrize("id_dtype", ["int64", "uint64"])
def test_embedding(monkeypatch, dtype, ids, id_dtype):
    weight, ids = normal(11, 5).astype(dtype), np.asarray(ids, dtype=id_dtype)
    assert_selected("embedding", weight, ids, scale=1.0)
    for scale in (1.0, 1.7):
        assert_same(monkeypatch, functools.partial(embedding, ids=ids, scale=scale), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(
    ("label_smoothing", "z_loss", "scale"), [(0.0, 0.0, 300.0), (0.1, 0.01, 1.0), (0.1, 0.0, 300.0)]
)
def test_cross_entropy(monkeypatch, dtype, labels, label_smoothing, z_loss, scale):
    logits, ids = (scale * normal(2, 4, 13)).astype(dtype), np.asarray(LABELS[labels])
    settings = {"pad_id": 0, "label_smoothing": label_smoothing, "z_loss": z_loss}
    assert_selected("cross_entropy", logits, ids, **settings)
    loss = functools.partial(cross_entropy, labels=ids, **settings)
    assert_same(monkeypatch, loss, logits)
    # A pad_id outside the vocabulary.
    outside = np.where(ids == 0, -100, ids)
    assert_same(monkeypatch, lambda x: cross_entropy(x, outside, pad_id=-100), logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_of_several_blocks_and_of_no_rows(monkeypatch, dtype):
    logits = normal(70, 3001).astype(dtype)
    labels = np.random.default_rng(4).integers(0, 3001, 70)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels, label_smoothing=0.1, z_loss=0.1), logits)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels[:0].reshape(0, 5)), normal(0, 5, 7).astype(dtype))
    columns = normal(7, 70).astype(dtype).T
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels % 7), columns)


# --- unsupported arrays -----------------------------------------------------------------------------------------------

HALF, SINGLE = np.ones((2, 3), "float16"), np.ones((2, 3), "float32")
IDS = np.zeros(2, dtype=int)
FOUR = np.ones((1, 1, 2, 3), "float32")
ATTENTION = {"causal": False, "scale": 1.0, "keep_probability": 1.0}
UNSUPPORTED = {
    "linear mixed": ("linear", (SINGLE, np.ones((3, 2)), None), {}, "mixed dtypes"),
    "layer_norm float16": ("layer_norm", (HALF, HALF[0], None), {"epsilon": 1e-5}, "dtype float16"),
    "relu float16": ("relu", (HALF,), {}, "dtype float16"),
    "dropout float16": ("dropout", (HALF, HALF > 0), {"keep_probability": 0.5}, "dtype float16"),
    "embedding float16": ("embedding", (HALF, IDS), {"scale": 1.0}, "dtype float16"),
    "cross_entropy float16": ("cross_entropy", (HALF, IDS), {}, "dtype float16"),
    "squared_norm float16": ("squared_norm", (HALF,), {}, "dtype float16"),
    "adam float16": ("adam", (None, HALF.copy(), HALF, SINGLE.copy(), SINGLE.copy()), {}, "mixed dtypes"),
    "attention bias": ("attention", (FOUR,) * 3 + (None, np.ones((2, 2)), None), ATTENTION, "mixed dtypes"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_explain_gives_the_reason(case):
    operation, arrays, static, reason = UNSUPPORTED[case]
    first, *lines = ops.explain(operation, *arrays, **static).splitlines()
    (line,) = (line for line in lines if line.startswith(f"  not numpy.{operation}: "))
    assert reason in line
    assert first == f"{operation} on numpy: portable definition"


def test_the_portable_definition_runs_what_kernels_do_not_support():
    half = normal(2, 3).astype("float16")
    assert linear(half, half.T).dtype == np.float16
    assert attention(*(normal(5, 3, seed=i) for i in range(3))).shape == (5, 3)
    wide = attention(normal(2, 1, 4, 3), *(normal(1, 2, 6, 3, seed=i) for i in (1, 2)))
    assert wide.shape == (2, 2, 4, 3)
    spread = dropout(normal(2, 3), np.asarray([[True, False, True]]), 0.5)
    assert spread.shape == (2, 3)
    assert (spread[:, 1] == 0).all()
