"""The source of initial parameters, and inputs of another dtype than the parameters."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close, library_or_skip
from tests.reference import normal, raises_line
from xformer import Initializer, MultiHeadAttention, value_and_grad
from xformer.backends import array_namespace, to_host
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.layers import (
    CopyHead,
    Embedding,
    FeedForward,
    GatedFeedForward,
    KVCache,
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


@pytest.mark.parametrize("name", LAYERS)
def test_inputs_are_cast_to_the_dtype_of_the_parameters(xp, name):
    layer = LAYERS[name](Initializer(xp, dtype="float32"))
    x = normal(0, 2, 3, 8)
    y = layer(xp.asarray(x, dtype=xp.float64))
    assert_close(y, to_host(layer(xp.asarray(x, dtype=xp.float32))), xp=xp, tolerance=0.0)


def test_all_inputs_of_attention_are_cast(xp):
    layer = MultiHeadAttention(8, 2, init=Initializer(xp, dtype="float32"))
    wide, narrow = (
        [
            xp.asarray(normal(seed, *shape), dtype=dtype)
            for seed, shape in enumerate([(2, 3, 8), (2, 5, 8), (2, 5, 8), (3, 5)])
        ]
        for dtype in (xp.float64, xp.float32)
    )
    expected = layer(*narrow[:3], bias=narrow[3])
    assert_close(layer(*wide[:3], bias=wide[3]), to_host(expected), xp=xp, tolerance=0.0)
    attended = layer.attend(wide[0], KVCache(*layer.keys_and_values(wide[1], wide[2])))
    assert_close(attended, to_host(layer(*narrow[:3])), xp=xp, tolerance=1e-6)


def test_a_copy_head_casts_its_inputs():
    head = CopyHead(8, init=Initializer(dtype="float32"))
    logits, source = normal(2, 1, 3, 6).astype("float32"), np.asarray([[3, 4, 5]])
    y = head(normal(0, 1, 3, 8), logits, normal(1, 1, 3, 8), source, None)
    assert y.dtype == "float32"


def test_a_memory_is_cast_to_the_dtype_of_the_model():
    config = xf.TransformerConfig(
        source_vocab_size=9, target_vocab_size=9, d_model=8, num_heads=2, d_ff=8, share_embeddings=True, copy=True,
        num_encoder_layers=1, num_decoder_layers=1,
    )  # fmt: skip
    model = xf.Transformer(config)
    assert model.decode([[1, 4]], normal(0, 1, 3, 8), source=[[3, 4, 5]]).dtype == "float32"


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


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
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


def test_value_defaults_to_key_and_key_to_query(xp):
    layer = MultiHeadAttention(8, 2, init=Initializer(xp, dtype="float64"))
    query, key, value = (xp.asarray(normal(seed, 2, 4, 8)) for seed in range(3))
    assert_close(layer(query, query, query), layer(query))
    assert_close(layer(query, key, key), layer(query, key))
    keys, values = layer.keys_and_values(key)[0], layer.keys_and_values(value)[1]
    assert_close(layer(query, key, value), layer.attend(query, KVCache(keys, values)))
    with raises_line(ShapeError, "value is given without key; expected both, or neither for self-attention"):
        layer(query, value=value)


def test_a_number_has_no_features(xp):
    layer = Linear(3, 2, init=Initializer(xp))
    with raises_line(ShapeError, r"linear got x of shape \(\); expected \(..., in_features\)"):
        layer(xp.asarray(1.0))
