"""The source of initial parameters, and inputs of another dtype than the parameters."""

from __future__ import annotations

import numpy as np

from tests.conftest import assert_close, library_or_skip
from tests.reference import for_each, normal, raises_line
from xformer import Initializer, MultiHeadAttention, value_and_grad
from xformer.backends import array_namespace, to_host
from xformer.errors import BackendError, ConfigError
from xformer.layers import (
    Embedding,
    FeedForward,
    GatedFeedForward,
    LayerNorm,
    LearnedPositions,
    Linear,
    MaxScaledLayerNorm,
    RMSNorm,
)

LAYERS = {
    "linear": lambda init: Linear(8, 8, init=init),
    "feed_forward": lambda init: FeedForward(8, 16, init=init),
    "gated": lambda init: GatedFeedForward(8, 16, init=init),
    "attention": lambda init: MultiHeadAttention(8, 2, init=init),
    "layer_norm": lambda init: LayerNorm(8, init=init),
    "rms_norm": lambda init: RMSNorm(8, init=init),
    "max_scaled": lambda init: MaxScaledLayerNorm(8, init=init),
    "learned_positions": lambda init: LearnedPositions(5, 8, init=init),
    "unembed": lambda init: Embedding(9, 8, init=init).unembed,
    "one_hot": lambda init: Embedding(8, 8, init=init),
}


@for_each("name", LAYERS)
def test_inputs_are_cast_to_the_dtype_of_the_parameters(xp, name):
    layer = LAYERS[name](Initializer(xp, dtype="float32"))
    x = normal(0, 2, 3, 8)
    y = layer(xp.asarray(x, dtype=xp.float64))
    assert_close(y, to_host(layer(xp.asarray(x, dtype=xp.float32))), xp=xp, tolerance=0.0)


def test_lists_and_arrays_of_other_libraries_are_refused():
    torch = library_or_skip("torch")
    with raises_line(BackendError, "arrays of torch and numpy were mixed; move one over"):
        Linear(4, 3, init=0)(torch.ones((2, 4), dtype=torch.float64))
    with raises_line(BackendError, "list"):
        Linear(4, 3, init=0)([[1.0, 2.0, 3.0, 4.0]])


def test_the_cast_is_differentiated():
    layer = Linear(8, 3, init=0)
    value, gradient = value_and_grad(lambda x: array_namespace(x).sum(layer(x)))(normal(0, 2, 8))
    assert (value.dtype, gradient.dtype) == ("float32", "float64")
    assert_close(gradient, np.broadcast_to(layer.weight.astype("float64").sum(axis=1), (2, 8)), tolerance=1e-6)


@for_each("make", LAYERS.values())
def test_random_weights_need_a_source(make):
    with raises_line(
        ConfigError, "^init is missing; pass a seed, e.g. init=0, another one for each layer, or one Init"
    ):
        make(None)


def test_a_layer_is_made_from_a_seed():
    layer, other = Linear(8, 3, init=0), Linear(8, 3, init=1)
    assert layer.weight.dtype == "float32"
    assert_close(layer.weight, Initializer("numpy", seed=0).xavier_uniform((8, 3)), tolerance=0.0)
    assert np.abs(layer.weight - other.weight).max() > 0.1
