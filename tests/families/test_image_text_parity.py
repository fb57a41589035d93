"""Outputs of tiny CLIP and SigLIP checkpoints equal those of transformers (see make_references.py)."""

import dataclasses
import json

import numpy as np
import pytest

import xformer as xf
from tests.checkpoints import DATA, copy, relative_error
from tests.families.test_parity import check_round_trip
from tests.reference import raises_line
from xformer.errors import CheckpointError, ConfigError, DataError, ShapeError
from xformer.families import load_pretrained, save_pretrained
from xformer.layers import EncoderLayer

CASES = ("clip", "siglip")


def load(name, **options):
    return load_pretrained(DATA / name, **options), dict(np.load(DATA / name / "reference.npz"))


@pytest.mark.parametrize("name", CASES)
def test_states_vectors_and_logits_equal_those_of_transformers(name, monkeypatch, tmp_path):
    states, call = [], EncoderLayer.__call__

    def record(layer, x, **options):
        states.extend([x] if layer in (model.text.layers[0], model.image.layers[0]) else [])
        states.append(call(layer, x, **options))
        return states[-1]

    monkeypatch.setattr(EncoderLayer, "__call__", record)
    model, reference = load(name, dtype="float64")
    assert relative_error(model(reference["images"], reference["tokens"]), reference["logits"]) < 1e-10
    for actual, expected in zip(states[:3], reference["image_hidden_states"], strict=True):
        assert relative_error(actual, expected) < 1e-10
    is_token = np.ones(reference["tokens"].shape, bool)
    if name == "clip":  # what follows the end of a text is not masked in transformers
        is_token = np.cumsum(reference["tokens"] == 60, axis=1) - (reference["tokens"] == 60) == 0
    for actual, expected in zip(states[3:], reference["text_hidden_states"], strict=True):
        assert relative_error(actual[is_token], expected[is_token]) < 1e-10
    for part, key, vectors in (("image", "images", model.encode_image), ("text", "tokens", model.encode_text)):
        expected = reference[f"{part}_vectors"]
        assert relative_error(vectors(reference[key]), expected) < 1e-10
        unit = expected / np.linalg.norm(expected, axis=1, keepdims=True)
        assert relative_error(vectors(reference[key], normalize=True), unit) < 1e-10
    check_round_trip(name, model, tmp_path)


def test_texts_end_with_the_first_end_token():
    model, reference = load("clip", dtype="float64")
    tokens = reference["tokens"]
    changed = np.where(np.cumsum(tokens == 60, axis=1) > 1, 7, tokens)
    changed[0, 5:] = 9
    np.testing.assert_array_equal(model.encode_text(changed), model.encode_text(tokens))
    np.testing.assert_allclose(model.encode_text(tokens[:1, :5]), model.encode_text(tokens[:1]), rtol=0, atol=1e-14)
    with raises_line(DataError, r"tokens\[1\] has no eos_id, 60; expected one at the end of each text"):
        model.encode_text(tokens[:, :8])


def test_padding_of_siglip_is_attended_to_unless_a_mask_says_otherwise():
    model, reference = load("siglip", dtype="float64")
    tokens, mask = reference["tokens"], np.arange(9)[None, :] < np.asarray([[5], [9], [7]])
    changed = np.where(mask, tokens, 1)
    assert np.abs(model.encode_text(changed) - model.encode_text(tokens))[[0, 2]].max() > 1e-3
    masked = model.encode_text(tokens, mask=mask)
    assert np.abs(masked - model.encode_text(tokens)).max() > 1e-3
    np.testing.assert_array_equal(masked[1], model.encode_text(tokens)[1])
    with raises_line(ShapeError, r"mask has shape \(3, 8\); expected \(3, 9\)"):
        model(reference["images"], tokens, mask=mask[:, 1:])


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("clip", {"text_config": {"eos_token_id": 2}}, None),
        ("clip", {"text_config": {"vocab_size": 60, "x": 1}, "text_config_dict": "text_config"}, None),
        ("clip", {"vision_config": {"image_size": [12, 16]}}, r"has image_size \[12, 16\]; expected a square"),
        ("clip", {"text_config": {"mlp_bias": 3}}, "has the key 'mlp_bias'"),
        ("clip", {"vision_config": {"hidden_size": -1}}, "has vision_config.hidden_size -1; expected an integer"),
        ("clip", {"projection_dim": 21}, "which gives text.pooler.linear.weight the shape"),
        ("siglip", {"vision_config": {"vision_use_head": False}}, "has vision_use_head False; expected True"),
        ("siglip", {"text_config": {"projection_size": 23}}, "vectors of texts have 23 features, those of images 24"),
        ("siglip", {"model_type": "siglip2"}, "has model_type 'siglip2'"),
    ],
)
def test_configurations_are_read_as_transformers_does_or_refused(name, changes, match, tmp_path):
    if "text_config_dict" in changes:
        changes["text_config_dict"] = json.loads((DATA / name / "config.json").read_text())["text_config"]
    directory = copy(name, tmp_path, **changes)
    if match is None:
        assert load_pretrained(directory).config == load_pretrained(DATA / name).config
    else:
        with raises_line(CheckpointError, match):
            load_pretrained(directory)


def test_configurations_that_do_not_fit_together_are_refused(tmp_path):
    model, reference = load("clip")
    config = model.config
    for changes, match in (
        ({"text": 3}, r"text is 3; expected EncoderConfig\(...\)"),
        ({"text": config.image}, r"text is ImageEncoderConfig\(.*; expected EncoderConfig\(...\)"),
        ({"text": {"vocab_size": 0}}, "text: vocab_size is 0"),
        ({"text": dataclasses.replace(config.text, pooler="none", pooling="cls", projection_dim=None)},
         "pooler of text is 'none'; expected a pooler"),
        ({"text": dataclasses.replace(config.text, projection_dim=5)}, "vectors of texts have 5 features"),
    ):  # fmt: skip
        with raises_line(ConfigError, match):
            dataclasses.replace(config, **changes)
    for changes in ({"pooler": "identity"}, {"num_labels": 2}, {"resize_positions": True}, {"classify_patches": True}):
        with raises_line(ConfigError, "class_token is false, pooler"):
            xf.ImageEncoderConfig(class_token=False, **changes)
    with raises_line(ConfigError, "projection_dim 5 and pooler 'attention'; expected a linear pooler"):
        xf.ImageEncoderConfig(pooler="attention", projection_dim=5)
    with raises_line(ShapeError, r"text_vectors has shape \(3, 24\); expected \(texts, 20\)"):
        model.logits(reference["image_vectors"], np.zeros((3, 24)))
    for changes, match in (({"eos_id": 2}, "clip: eos_id of text is 2"), ({"causal": False}, "text.causal is False")):
        changed = dataclasses.replace(config, text=dataclasses.replace(config.text, **changes))
        with raises_line(ConfigError, match):
            save_pretrained(xf.ImageTextEncoder(changed), tmp_path, model_type="clip")


def test_a_model_is_saved_and_loaded_with_its_parts(tmp_path):
    model, reference = load("siglip")
    model.save(tmp_path / "model.safetensors")
    again = xf.load(tmp_path / "model.safetensors")
    assert again.config == model.config
    np.testing.assert_array_equal(
        again(reference["images"], reference["tokens"]), model(reference["images"], reference["tokens"])
    )
    new = xf.ImageTextEncoder(model.config, seed=3)
    assert {k: x.shape for k, x in new.named_parameters()} == {k: x.shape for k, x in model.named_parameters()}
    assert float(new.logit_scale[0]) == pytest.approx(np.log(10.0))
    assert model.quantize("int8").pack()(reference["images"], reference["tokens"]).shape == (2, 3)
