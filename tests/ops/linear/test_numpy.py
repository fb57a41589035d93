"""Linear maps on NumPy: values and gradients equal those of the portable definitions."""

from __future__ import annotations

import itertools

import pytest

import xformer as xf
from tests.ops.numpy_cases import DTYPES, LAYOUTS, assert_same, assert_selected, normal, with_layout
from xformer.ops import linear

pytestmark = pytest.mark.usefixtures("no_native")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(monkeypatch, layout, dtype):
    x, weight, bias = with_layout(layout, dtype), normal(7, 9, seed=1).astype(dtype), normal(9, seed=2).astype(dtype)
    assert_selected("linear", x, weight, bias)
    assert_same(monkeypatch, linear, x, weight, bias)
    assert_same(monkeypatch, linear, x, weight)
    assert_same(monkeypatch, linear, x, normal(9, 7, seed=1).astype(dtype).T)


def test_gradients_of_some_inputs(monkeypatch):
    x, weight, bias = normal(3, 5, 7), normal(7, 9, seed=1), normal(9, seed=2)
    assert_same(monkeypatch, lambda x: linear(x, weight, bias), x)
    assert_same(monkeypatch, lambda weight: linear(x, weight, bias), weight)
    assert_same(monkeypatch, lambda bias: linear(x, weight, bias), bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("widths", [(6, 6, 6), (8, 2, 2), (5,)])
@pytest.mark.parametrize("rows", [(3, 17), (25, 9), (0, 5), (3, 0)], ids=str)
def test_project_heads(monkeypatch, dtype, biased, widths, rows):
    x = normal(*rows, 4).astype(dtype)
    weights = [normal(4, width, seed=width + position).astype(dtype) for position, width in enumerate(widths)]
    biases = [normal(width, seed=width).astype(dtype) for width in widths] if biased else []
    count = len(weights)

    def function(x, *maps):
        padded = maps if biased else (*maps, *[None] * count)
        heads = xf.ops.project_heads(
            x, *((padded[i], padded[count + i], 1 + (i == 0 and count > 1)) for i in range(count))
        )
        xp = xf.backends.array_namespace(x)
        return xp.concat([xp.reshape(each, (-1,)) for each in heads])

    assert_selected(
        "project_heads", x, *itertools.chain(*zip(weights, biases or [None] * count, strict=True)), heads=(1,) * count
    )
    assert_same(monkeypatch, function, x, *weights, *biases)


@pytest.mark.parametrize("position", [0, 1])
def test_project_heads_with_one_bias_that_is_differentiated(monkeypatch, position):
    x, weights, biases = normal(2, 20, 4), [normal(4, 6, seed=1)] * 2, [normal(6, seed=2), normal(6, seed=3)]

    def function(bias):
        own = [bias if i == position else biases[i] for i in range(2)]
        return xf.ops.project_heads(x, *((weights[i], own[i], 2) for i in range(2)))[position]

    assert_same(monkeypatch, function, biases[position].copy())


def test_project_heads_with_one_bias_and_many_rows(monkeypatch):
    arrays = normal(2, 50, 4), normal(4, 6, seed=1), normal(4, 6, seed=2), normal(6, seed=3)
    assert_same(monkeypatch, lambda x, v, w, bias: xf.ops.project_heads(x, (v, None, 2), (w, bias, 3))[1], *arrays)


def test_project_heads_with_an_unused_output(monkeypatch):
    arrays = normal(2, 20, 4), normal(4, 6, seed=1), normal(4, 6, seed=2)
    assert_same(monkeypatch, lambda x, v, w: xf.ops.project_heads(x, (v, None, 2), (w, None, 3))[1], *arrays)
