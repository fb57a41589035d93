"""Cross-entropy of the native library: losses and derivatives equal those of the definition."""

from __future__ import annotations

import functools

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
from tests.ops.numpy_cases import LABELS, assert_same
from tests.reference import for_each
from xformer import vjp
from xformer.ops import cross_entropy

pytestmark = needs_library


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize(
    ("label_smoothing", "z_loss", "scale"), [(0.0, 0.0, 1e30), (0.1, 0.01, 1.0), (0.1, 0.0, 300.0)]
)
def test_settings(monkeypatch, labels, label_smoothing, z_loss, scale):
    logits, ids = np.float32(scale) * single(2, 4, 37), np.asarray(LABELS[labels])
    settings = {"pad_id": 0, "label_smoothing": label_smoothing, "z_loss": z_loss}
    assert_selected("cross_entropy", logits, ids, **settings)
    assert_same(monkeypatch, functools.partial(cross_entropy, labels=ids, **settings), logits)
    outside = np.where(ids == 0, -100, ids)  # a pad_id outside the vocabulary
    assert_same(monkeypatch, lambda x: cross_entropy(x, outside, **settings | {"pad_id": -100}), logits)


@for_each("rows", [0, 1, 3, 100])
def test_sizes(rows):
    settings = {"label_smoothing": 0.1, "z_loss": 0.01}
    for classes in [*SIZES, 20_011]:
        labels = np.random.default_rng(classes).integers(0, classes, rows)
        logits = 5.0 * single(rows, classes)
        assert_precise(lambda x, labels=labels: cross_entropy(x, labels, **settings), logits, tolerance=2e-6)


def test_strided_and_empty_logits(monkeypatch):
    labels = np.random.default_rng(4).integers(0, 7, 70)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels.astype("uint8")), single(7, 70).T)
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels[:0].reshape(0, 5)), single(0, 5, 7))
    assert_same(monkeypatch, lambda x: cross_entropy(x, labels[::2]), single(35, 7))


def test_padding_is_ignored_and_logits_may_be_infinite():
    logits = single(3, 5)
    logits[0], logits[1, 2] = np.nan, -np.inf
    losses, pull = vjp(lambda x: cross_entropy(x, np.asarray([0, 1, 4]), pad_id=0), logits)
    (gradient,) = pull(np.ones(3, "float32"))
    assert losses[0] == 0.0
    assert not gradient[0].any()
    assert gradient[1, 2] == 0.0
    assert np.isfinite(losses).all()
    assert np.isfinite(gradient).all()


@for_each("place", [0, 17, 36])
@for_each("special", SPECIAL)
@for_each("label_smoothing", [0.0, 0.1])
def test_special_logits(special, place, label_smoothing):
    logits = single(3, 37)
    logits[1, place] = special
    labels = np.asarray([3, 5, 7])
    assert_precise(lambda x: cross_entropy(x, labels, label_smoothing=label_smoothing), logits, tolerance=2e-6)
