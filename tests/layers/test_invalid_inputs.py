"""Every layer refuses what is not an array of the right shape."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.reference import for_each
from xformer import layers
from xformer.backends import from_host
from xformer.errors import ConfigError, ShapeError, XformerError
from xformer.random import Rng

X = np.ones((2, 5, 8), np.float32)
IDS = np.ones((2, 5), np.int64)
MASK = np.ones((2, 1, 1, 5), bool)
HEADS = np.ones((2, 2, 5, 4), np.float32)
ATTENTION = layers.MultiHeadAttention(8, 2, init=0)
FEED_FORWARD = layers.FeedForward(8, 16, dropout=0.1, init=0)
RESIDUAL = layers.PreNorm(layers.LayerNorm(8), dropout=0.1)
SOME_RNG = Rng(0)

CASES = {
    "Linear": (layers.Linear(8, 8, init=0), X),
    "Dropout": (layers.Dropout(0.1), X),
    "Dropout, rng": (layers.Dropout(0.1), X, SOME_RNG),
    "LayerNorm": (layers.LayerNorm(8), X),
    "RMSNorm": (layers.RMSNorm(8), X),
    "MaxScaledLayerNorm": (layers.MaxScaledLayerNorm(8), X),
    "MultiHeadAttention": (ATTENTION, X, X, X),
    "Embedding": (layers.Embedding(8, 8, init=0), IDS),
    "FeedForward": (FEED_FORWARD, X, SOME_RNG),
    "GatedFeedForward": (layers.GatedFeedForward(8, 16, init=0), X),
    "Conv1d": (layers.Conv1d(8, 8, init=0), X),
    "AudioEmbedding": (layers.AudioEmbedding(8, 8, init=0), X),
    "PatchEmbedding": (layers.PatchEmbedding(3, 8, patch_size=4, init=0), np.ones((2, 3, 8, 8), np.float32)),
    "EncoderLayer": (layers.EncoderLayer(ATTENTION, FEED_FORWARD, RESIDUAL, RESIDUAL), X),
    "DecoderLayer": (layers.DecoderLayer(ATTENTION, ATTENTION, FEED_FORWARD, RESIDUAL, RESIDUAL, RESIDUAL), X, X),
    "Sinusoidal": (layers.Sinusoidal(8), X, IDS),
    "LearnedPositions": (layers.LearnedPositions(9, 8, init=0), X, IDS),
    "InputEmbedding": (layers.InputEmbedding(positions=layers.Sinusoidal(8)), X),
    "CopyHead": (layers.CopyHead(8, init=0), X, X, X, IDS, MASK),
    "KVCache": (lambda *arrays: layers.KVCache().append(*arrays), HEADS, HEADS),
}
NOT_ARRAYS = {"list": X.tolist(), "empty list": [], "text": "x", "number": 1.5, "class": np.ndarray, "dict": {"a": X}}
OTHER_ARRAYS = {"no axes": np.float32(1.0), "one axis": X[0, 0], "four axes": X[None], "objects": np.asarray([None])}


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@for_each("name", CASES)
def test_what_is_not_an_array_is_refused(name, library):
    layer, *inputs = CASES[name]
    xp = library_or_skip(library)
    layer = layer.to(xp) if hasattr(layer, "to") else layer
    inputs = [from_host(xp, x) if isinstance(x, np.ndarray) else x for x in inputs]
    layer(*inputs)
    for index, x in enumerate(inputs):
        for value in NOT_ARRAYS.values():
            with pytest.raises(XformerError):
                layer(*inputs[:index], value, *inputs[index + 1 :])
        if x is not SOME_RNG and library == "numpy":
            for value in OTHER_ARRAYS.values():
                with contextlib.suppress(XformerError):  # but no error of NumPy
                    layer(*inputs[:index], value, *inputs[index + 1 :])


def test_messages_have_one_line():
    assert "\n" not in str(ShapeError(f"x is {X!r}"))


def test_the_hint_names_the_argument():
    with pytest.raises(ShapeError, match=r"^x is a list; expected an array, e\.g\. xp\.asarray"):
        layers.Dropout(0.1)([1.0, 2.0])


@for_each(
    "make",
    [
        lambda: layers.Linear(8.0, 8, init=0),
        lambda: layers.LayerNorm("8"),
        lambda: layers.MultiHeadAttention(8, "2", init=0),
        lambda: layers.MultiHeadAttention(8, 2, num_key_value_heads=[1], init=0),
        lambda: layers.Dropout("0.1"),
        lambda: layers.Dropout([0.1]),
    ],
)
def test_sizes_and_rates_are_numbers(make):
    with pytest.raises(ConfigError):
        make()
