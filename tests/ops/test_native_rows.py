"""Kernels of the native library for elements and rows equal the definitions, for any size, layout and special value."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

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
from tests.ops.numpy_cases import LABELS, LAYOUTS, assert_same, with_layout
from tests.reference import for_each
from xformer import native, ops, vjp
from xformer.kernels import native as kernel
from xformer.ops import (
    cross_entropy,
    dropout,
    embedding,
    gelu,
    gelu_tanh,
    layer_norm,
    relu,
    rms_norm,
    rotate,
    silu,
    softmax,
    squared_norm,
)

pytestmark = needs_library
ACTIVATIONS = [relu, gelu, gelu_tanh, silu]
LARGE = 20_011
WEIGHT, BIAS = single(14, seed=1)[::2], single(7, seed=2)


def random_bools(*shape):
    return np.random.default_rng(3).random(shape) < 0.7


def angles(length, half, dtype="float32"):
    values = single(length, 2 * half)[:, ::2].astype(dtype)
    return np.cos(values), np.sin(values)


# By operation: what the kernel gets beside an array of 7 features, its options, and functions of this array.
OF_LAYOUTS: dict[str, tuple[Callable[[Any], tuple[Any, ...]], dict[str, Any], list[Callable[..., Any]]]] = {
    **{function.__name__: (lambda x: (), {}, [function]) for function in ACTIVATIONS},
    "softmax": (lambda x: (None,), {}, [softmax]),
    "squared_norm": (lambda x: (), {}, [squared_norm, lambda x: squared_norm(x, BIAS)]),
    "rms_norm": (lambda x: (WEIGHT,), {"epsilon": 1e-5}, [lambda x: rms_norm(x, WEIGHT)]),
    "layer_norm": (
        lambda x: (WEIGHT, BIAS),
        {"epsilon": 1e-5},
        [lambda x: layer_norm(x, WEIGHT, BIAS), lambda x: layer_norm(x, WEIGHT, None, epsilon=0.1)],
    ),
    "dropout": (
        lambda x: (random_bools(*x.shape),),
        {"keep_probability": 0.7},
        [
            lambda x: dropout(x, random_bools(*x.shape), 0.7),
            lambda x: dropout(x, random_bools(*x.shape[::-1]).T, 0.7),
            lambda x: dropout(x, random_bools(*x.shape)[..., :1], 0.7),  # broadcasts
        ],
    ),
}


@pytest.mark.parametrize("operation", OF_LAYOUTS)
@for_each("layout", LAYOUTS)
def test_layouts(monkeypatch, operation, layout):
    x, (others, options, functions) = with_layout(layout, "float32"), OF_LAYOUTS[operation]
    assert_selected(operation, x, *others(x), **options)
    for function in functions:
        assert_same(monkeypatch, function, x)


def test_layouts_of_parameters_ids_and_cotangents(monkeypatch):
    x, ids = single(3, 5, 7), np.random.default_rng(0).integers(0, 9, 30)
    assert_same(monkeypatch, lambda weight, bias: layer_norm(x, weight, bias), WEIGHT, BIAS)
    assert_same(monkeypatch, lambda weight: rms_norm(x, weight), WEIGHT)
    for function in ACTIVATIONS:
        assert_precise(function, single(5, 7), g=single(7, 10)[:, ::2].T)
    for weight in (single(7, 9).T, single(9, 14)[:, ::2], single(9, 7)[::-1]):
        assert_same(monkeypatch, lambda w: embedding(w, ids), weight)
    for dtype, scale in (("uint8", 1.0), ("int32", 2.5), ("int64", 1.0)):
        for own in (ids.reshape(6, 5)[::2].T, np.asarray(ids[3]), ids[:0].reshape(0, 3)):
            assert_selected("embedding", single(9, 7), own.astype(dtype), scale=scale)
            function = functools.partial(embedding, ids=own.astype(dtype), scale=scale)
            assert_same(monkeypatch, function, single(9, 7))


# By operation: a function of a number of rows and features that returns a function and its arrays.
OF_SIZES: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
    **{f.__name__: lambda rows, n, f=f: (f, single(rows, n)) for f in ACTIVATIONS},
    "softmax": lambda rows, n: (softmax, 5.0 * single(rows, n)),
    "rms_norm": lambda rows, n: (lambda x, w: rms_norm(x, w, epsilon=1e-3), single(rows, n), single(n, seed=1)),
    "layer_norm": lambda rows, n: (
        lambda x, w, b: layer_norm(x, w, b, epsilon=1e-3), single(rows, n), single(n, seed=1), single(n, seed=2)
    ),
    "cross_entropy": lambda rows, n: (
        lambda x: cross_entropy(x, np.arange(rows) * 7 % n, label_smoothing=0.1, z_loss=0.01), 5.0 * single(rows, n)
    ),
}  # fmt: skip


@pytest.mark.parametrize("operation", OF_SIZES)
def test_sizes(operation):
    for rows, sizes in ((0, SIZES[:20]), (1, [*SIZES, LARGE]), (3, [*SIZES, LARGE]), (300, SIZES)):
        for size in sizes:
            function, *arrays = OF_SIZES[operation](rows, size)
            assert_precise(function, *arrays, tolerance=1e-6 if function in ACTIVATIONS else 4e-6)


def test_sizes_of_other_kernels(monkeypatch):
    for function in (*ACTIVATIONS, softmax):
        for shape in [(0,), (3, 0), (0, 5)]:
            output, pull = vjp(function, single(*shape))
            assert output.shape == pull(output)[0].shape == shape
    for size in [0, *SIZES, 200_003]:
        keep = random_bools(size)
        assert_same(monkeypatch, lambda x, keep=keep: dropout(x, keep, 0.7), single(size))
    for features in [0, *SIZES]:
        ids = np.random.default_rng(features).integers(0, 5, 200)
        weight, g = single(9, features), single(200, features, seed=1)
        expected = np.zeros(weight.shape)
        np.add.at(expected, ids, g.astype("float64"))
        output, pull = vjp(lambda w, ids=ids: embedding(w, ids), weight)
        np.testing.assert_array_equal(output, weight[ids])
        np.testing.assert_allclose(pull(g)[0], expected, rtol=0.0, atol=2e-5)
    for count in (1, 11, 12, 40):
        sizes = [[*SIZES, 0, kernel._BLOCK, 3 * kernel._BLOCK + 1][i % (len(SIZES) + 3)] for i in range(count)]
        arrays = [single(size, seed=size) for size in sizes] + [single(0, 3).T, single(5, 4).T]
        expected = sum((x.astype("float64") ** 2).sum() for x in arrays)
        np.testing.assert_allclose(squared_norm(*arrays), expected, rtol=3e-7)


@for_each("length, half, features", [(0, 2, 7), (1, 0, 7), (5, 3, 7), (9, 16, 32), (9, 13, 33), (9, 67, 140)])
def test_rotations(monkeypatch, length, half, features):
    tables = {dtype: angles(length, half, dtype) for dtype in ("float32", "float64")}
    x = single(2, length, 3, 2 * features, seed=1).transpose((0, 2, 1, 3))[..., ::2]
    for each in (x, single(2, 3, length, features)):
        assert_selected("rotate", each, *tables["float32"])
        assert_same(monkeypatch, lambda x: rotate(x, *tables["float32"]), each)
        assert_precise(lambda x: rotate(x, *tables[x.dtype.name]), each)


def masks(shape):
    """Return masks of all strides: contiguous, transposed, every other element, and broadcast axes."""
    mask = random_bools(*shape)
    every_other = random_bools(*shape[:-1], 2 * shape[-1])[..., ::2]
    return [mask, mask.T.copy().T, every_other, mask[..., :1], mask[0], mask[:, :1, ::-1], np.zeros((1, 1, 1), bool)]


@for_each("size", [1, 5, 16, 37, 70])
def test_masks_of_softmax(monkeypatch, size):
    x = 5.0 * single(3, 4, size)
    for mask in masks(x.shape):
        assert_selected("softmax", x, mask)
        assert_same(monkeypatch, lambda x, mask=mask: softmax(x, mask), x)


@for_each("labels", LABELS)
@for_each("label_smoothing, z_loss, scale", [(0.0, 0.0, 1e30), (0.1, 0.01, 1.0), (0.1, 0.0, 300.0)])
def test_settings_of_cross_entropy(monkeypatch, labels, label_smoothing, z_loss, scale):
    logits, ids = np.float32(scale) * single(2, 4, 37), np.asarray(LABELS[labels])
    settings = {"pad_id": 0, "label_smoothing": label_smoothing, "z_loss": z_loss}
    assert_selected("cross_entropy", logits, ids, **settings)
    assert_same(monkeypatch, functools.partial(cross_entropy, labels=ids, **settings), logits)
    outside = np.where(ids == 0, -100, ids)  # a pad_id outside the vocabulary
    assert_same(monkeypatch, lambda x: cross_entropy(x, outside, **settings | {"pad_id": -100}), logits)


def test_strided_logits_and_labels(monkeypatch):
    labels = np.random.default_rng(4).integers(0, 7, 70)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels.astype("uint8")), single(7, 70).T)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels[:0].reshape(0, 5)), single(0, 5, 7))
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels[::2]), single(35, 7))


# --- precision and special values -------------------------------------------------------------------------------------


def test_gelu_has_the_precision_of_float32():
    x = np.linspace(-16.0, 16.0, 99_991).astype("float32")
    tail, wide = np.asarray([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x.tolist()]), x.astype("float64")
    expected, slope = wide * tail, tail + wide * np.exp(-0.5 * wide * wide) / math.sqrt(2.0 * math.pi)
    output, pull = vjp(gelu, x)
    np.testing.assert_allclose(output, expected, rtol=0.0, atol=4e-7)
    np.testing.assert_allclose(pull(np.ones_like(x))[0], slope, rtol=0.0, atol=4e-7)
    tails = (x > -12.0) & (x < -0.01)
    np.testing.assert_allclose(output[tails], expected[tails], rtol=1e-5)


@for_each("function", [gelu_tanh, silu])
def test_logistic_units_have_the_precision_of_float32(function):
    x = np.concatenate([np.linspace(-20.0, 20.0, 4001), [-1e4, 1e4, 0.0]]).astype(np.float32)
    output, pull = vjp(function, x)
    expected, expected_pull = vjp(function, x.astype(np.float64))
    np.testing.assert_allclose(output, expected, rtol=4e-6, atol=1e-7)
    np.testing.assert_allclose(pull(np.ones_like(x))[0], expected_pull(np.ones(x.shape))[0], rtol=4e-6, atol=1e-6)


def test_a_large_mean_is_subtracted_first():
    x, ones = single(4, 512) + 1000.0, np.ones(512, "float32")
    assert_precise(lambda x: layer_norm(x, ones, None), x, tolerance=2e-4)


@for_each("function", ACTIVATIONS)
def test_special_values_of_activations(function):
    x = np.asarray([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0, -0.0, 1e-40], np.float32)
    output, pull = vjp(function, x)
    (slope,) = pull(np.ones_like(x))
    np.testing.assert_allclose(output, [np.nan, np.inf, 0.0, 1e30, 0.0, 0.0, 0.0, 0.0], atol=1e-30)
    middle = [0.0] * 2 if function is relu else [0.5] * 2
    np.testing.assert_allclose(slope[:7], [0.0 if function is relu else np.nan, 1.0, 0.0, 1.0, 0.0, *middle], atol=1e-6)
    if function is relu:  # drops cotangents that are not finite
        _, pull = vjp(relu, np.asarray([1.0, -1.0, -np.inf], "float32"))
        np.testing.assert_array_equal(pull(np.asarray([np.inf, np.nan, np.inf], "float32"))[0], [np.inf, 0.0, 0.0])


@for_each("special", SPECIAL)
def test_special_values_of_rows(special):
    x = single(3, 40)
    for place in (0, 17, 39):
        x[1] = single(40)
        x[1, place] = special
        assert_precise(softmax, x, tolerance=2e-6)
        for smoothing in (0.0, 0.1):
            loss = functools.partial(cross_entropy, labels=np.asarray([3, 5, 7]), label_smoothing=smoothing)
            assert_precise(loss, x, tolerance=2e-6)
    np.testing.assert_array_equal(squared_norm(single(20), x), np.square(np.float32(special)))
    x, keep = np.asarray([1.0, -2.0, 3.0, special], "float32"), np.asarray([True, True, False, False])
    np.testing.assert_array_equal(dropout(x, keep, 0.5), [2.0, -4.0, 0.0, 0.0])
    np.testing.assert_array_equal(dropout(x[::-1], keep, 1.0), [special, 3.0, 0.0, 0.0])
    x, keep = np.tile(x, 40), np.tile(keep, 40)  # whole vectors
    np.testing.assert_array_equal(dropout(x, keep, 0.5), np.tile([2.0, -4.0, 0.0, 0.0], 40))


@for_each("special", [*SPECIAL, 1e30])
def test_a_special_value_stays_in_its_row(special):
    x, ones = single(3, 21), np.ones(21, "float32")
    x[1, 20] = special
    for function in (lambda x: layer_norm(x, ones, ones), lambda x: rms_norm(x, ones)):
        output, pull = vjp(function, x)
        expected, expected_pull = vjp(function, x.astype("float64"))
        (dx,), (expected_dx,) = pull(np.ones_like(x)), expected_pull(np.ones(x.shape))
        np.testing.assert_allclose(output[::2], expected[::2], atol=1e-5)
        np.testing.assert_allclose(dx[::2], expected_dx[::2], atol=1e-5)
        if special != 1e30:  # whose square overflows in float32
            np.testing.assert_array_equal(np.isnan(output), np.isnan(expected))
            np.testing.assert_array_equal(np.isnan(dx), np.isnan(expected_dx))


def test_special_values_of_rotations_embeddings_and_sums():
    x, ones = single(1, 1, 1, 8), np.ones((1, 3), "float32")
    x[..., 1], x[..., 6] = np.nan, np.inf
    output, pull = vjp(lambda x: rotate(x, ones, ones), x)
    for y in (output, pull(x)[0]):
        np.testing.assert_array_equal(np.isfinite(y[0, 0, 0]), [True, False, True, True, False, True, False, True])
    g = single(3, 20)
    g[1, 3] = np.nan
    _, pull = vjp(lambda w: embedding(w, np.asarray([0, 2, 0])), single(4, 20))
    np.testing.assert_array_equal(np.argwhere(np.isnan(pull(g)[0])), [[2, 3]])
    assert squared_norm(np.full(3, 1e30, "float32")) == np.inf


def test_masked_values_and_padding_are_ignored():
    x, keep = single(3, 40), np.ones((3, 40), bool)
    x[0, ::2], x[2], keep[0, ::2], keep[2] = np.nan, np.inf, False, False
    output, pull = vjp(lambda x: softmax(x, keep), x)
    (dx,) = pull(single(3, 40, seed=1))
    np.testing.assert_allclose(output.sum(axis=-1), [1.0, 1.0, 0.0], rtol=1e-6)
    assert not output[~keep].any()
    assert not dx[~keep].any()
    logits = single(3, 5)
    logits[0], logits[1, 2] = np.nan, -np.inf
    losses, pull = vjp(lambda x: cross_entropy(x, np.asarray([0, 1, 4]), pad_id=0), logits)
    (gradient,) = pull(np.ones(3, "float32"))
    assert losses[0] == gradient[1, 2] == 0.0
    assert not gradient[0].any()
    assert np.isfinite(losses).all()
    assert np.isfinite(gradient).all()


def test_what_is_refused():
    x = np.zeros(13, "uint8")[1:].view("float32")
    (line,) = (line for line in ops.explain("gelu", x).splitlines() if "native.gelu" in line)
    assert line == "  not native.gelu: an array is not aligned in memory"
    for wrong in (-1, 9, 2**62):
        target = np.zeros((9, 7), "float32")
        with pytest.raises(IndexError, match="an index is out of range"):
            native.call("add_rows", (single(2, 7), np.asarray([3, wrong]), target), n0=1.0)
        assert not np.delete(target, 3, axis=0).any()
