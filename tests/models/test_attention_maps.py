"""Attention weights of whole models."""

from __future__ import annotations

import numpy as np
import pytest

from tests.reference import raises_line
from xformer.errors import ConfigError
from xformer.layers import MultiHeadAttention
from xformer.models import Encoder, EncoderConfig, Transformer, TransformerConfig, attention_maps

SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 16}


def test_an_encoder_decoder_has_three_kinds():
    vocab = {"source_vocab_size": 9, "target_vocab_size": 9}
    config = TransformerConfig(**vocab, **SIZES, num_encoder_layers=1, num_decoder_layers=2)
    model = Transformer(config, xp=np, dtype="float64")
    source, target = [[5, 6, 7, 2]], [[1, 4, 8]]
    maps = attention_maps(model, source, target)
    assert {kind: [layer.shape for layer in layers] for kind, layers in maps.items()} == {
        "encoder": [(1, 2, 4, 4)],
        "decoder": [(1, 2, 3, 3)] * 2,
        "cross": [(1, 2, 3, 4)] * 2,
    }
    for layer, expected in zip(maps["cross"], model.cross_attention_weights(source, target), strict=True):
        np.testing.assert_allclose(layer, expected)
    assert np.triu(maps["decoder"][0][0, 0], 1).max() == 0.0
    for layers in maps.values():
        np.testing.assert_allclose(np.concatenate(layers).sum(axis=-1), 1.0)


@pytest.mark.parametrize("share_layers", [False, True])
def test_an_encoder_has_its_own_layers(share_layers):
    model = Encoder(EncoderConfig(vocab_size=9, **SIZES, num_layers=2, share_layers=share_layers))
    assert [layer.shape for layer in attention_maps(model, [[5, 6, 7]])["encoder"]] == [(1, 2, 3, 3)] * 2


def test_other_models_are_refused():
    with raises_line(ConfigError, "model is a MultiHeadAttention; expected a Transformer, LanguageModel or Encoder"):
        attention_maps(MultiHeadAttention(8, 2, init=0), [[1]])
