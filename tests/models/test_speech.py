"""Models whose source is audio."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.reference import normal, raises_line, weighted_sum
from xformer.errors import ConfigError, ShapeError
from xformer.models import SpeechTransformer, SpeechTransformerConfig, load

FRAMES = normal(0, 3, 11, 5)
TARGET = np.asarray([[1, 7, 3], [1, 4, 4], [1, 9, 6]])


def small_speech_model(**settings):
    sizes = {"d_model": 8, "num_heads": 2, "d_ff": 12, "num_encoder_layers": 2, "num_decoder_layers": 2}
    defaults = {"source_vocab_size": 5, "target_vocab_size": 13, "key_bias": False, "dropout": 0.0}
    return SpeechTransformer(SpeechTransformerConfig(**{**sizes, **defaults, **settings}), dtype="float64")


@pytest.fixture(scope="module")
def model():
    return small_speech_model(positions="learned", max_positions=12, max_source_positions=6)


def test_positions_of_source_and_target_have_sizes_of_their_own(model):
    assert model.encoder_input.positions.weight.shape == (6, 8)
    assert model.decoder_input.positions.weight.shape == (12, 8)
    assert model(FRAMES, TARGET).shape == (3, 3, 13)
    assert model.encode(FRAMES).shape == (3, 6, 8)
    with raises_line(ShapeError, "a sentence has 7 tokens; this model has learned positions for 6"):
        model(normal(0, 3, 13, 5), TARGET)


def test_decoding_with_a_cache_equals_decoding_without(model):
    outputs = xf.generate(model, FRAMES, max_new_tokens=6)
    tokens = np.ones((3, 1), dtype=np.int64)
    for _ in range(6):
        tokens = np.concatenate([tokens, np.argmax(model(FRAMES, tokens)[:, -1:, 3:], axis=-1) + 3], axis=1)
    for (output,), row in zip(outputs, tokens, strict=True):
        assert list(output.tokens) == row[1 : 1 + len(output.tokens)].tolist()


def test_masked_frames_have_no_influence(model):
    changed, mask = FRAMES.copy(), np.ones((3, 1, 1, 6), dtype=bool)
    changed[:, 8:] += 1.0  # the convolutions see these frames from the vector 3 on
    mask[..., 3:] = False
    assert_close(model(changed, TARGET, source_mask=mask), model(FRAMES, TARGET, source_mask=mask))
    assert np.abs(model(changed, TARGET) - model(FRAMES, TARGET)).max() > 1e-3


def test_every_parameter_has_a_gradient(model):
    weights = normal(1, 3, 3, 13)
    _, gradients = xf.value_and_grad(lambda m: weighted_sum(m(FRAMES, TARGET), weights))(model)
    for name, gradient in gradients.named_parameters():
        assert np.abs(gradient).max() > 0, name
    assert "encoder.0.self_attention.key.bias" not in dict(model.named_parameters())


def test_models_are_saved_and_loaded(model, tmp_path):
    model.save(tmp_path / "model.safetensors")
    again = load(tmp_path / "model.safetensors")
    assert type(again) is SpeechTransformer
    assert_close(again(FRAMES, TARGET), model(FRAMES, TARGET), tolerance=0.0)


@pytest.mark.parametrize("source", [[[3, 4, 5]], normal(0, 2, 5), normal(0, 1, 9, 4)])
def test_a_source_other_than_frames_is_an_error(model, source):
    with raises_line(ShapeError, r"source has shape .* expected floating frames \(batch, frames, 5\)"):
        model(source, TARGET[:1])


@pytest.mark.parametrize("name", ["share_embeddings", "length_encoding"])
def test_settings_of_text_are_errors(name):
    with raises_line(ConfigError, f"{name} is true; a model of audio expects false"):
        small_speech_model(**{name: True}, target_vocab_size=5)


def test_a_model_with_alternating_positions_is_in_no_family(tmp_path):
    with pytest.raises(ConfigError, match="whisper: positions is 'sinusoidal'"):
        xf.save_pretrained(small_speech_model(), tmp_path)
