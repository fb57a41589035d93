"""Outputs of tiny ViT and DINOv2 checkpoints equal those of transformers (see make_references.py)."""

import numpy as np
import pytest

import xformer as xf
from tests.checkpoints import DATA, change_config, copy, relative_error
from tests.families.test_parity import check_round_trip
from tests.reference import raises_line
from xformer.errors import CheckpointError, ConfigError, ShapeError
from xformer.families import load_pretrained, save_pretrained
from xformer.layers import EncoderLayer

CASES = ("vit", "vit_classifier", "dinov2", "dinov2_swiglu")


def run(name, **options):
    reference = dict(np.load(DATA / name / "reference.npz"))
    model = load_pretrained(DATA / name, **options)
    return model, model(reference["images"]), reference


@pytest.mark.parametrize("name", CASES)
def test_states_of_every_layer_and_heads_equal_those_of_transformers(name, monkeypatch, tmp_path):
    inputs, outputs, call = [], [], EncoderLayer.__call__

    def record(layer, x, **options):
        inputs.append(x)
        outputs.append(call(layer, x, **options))
        return outputs[-1]

    monkeypatch.setattr(EncoderLayer, "__call__", record)
    model, states, reference = run(name, dtype="float64")
    for actual, expected in zip([inputs[0], *outputs], reference["hidden_states"], strict=True):
        assert relative_error(actual, expected) < 1e-10
    if "logits" in reference:
        assert relative_error(model.class_logits(states), reference["logits"]) < 1e-10
    else:
        pooled = states[:, 0] if model.pooler is None else model.pooler(states)
        assert relative_error(states, reference["states"]) < 1e-10
        assert relative_error(pooled, reference["pooled"]) < 1e-10
    check_round_trip(name, model, tmp_path)


@pytest.mark.parametrize("name", ["dinov2", "dinov2_swiglu"])
def test_positions_are_interpolated_for_images_of_other_sizes(name, monkeypatch):
    outputs, call = [], EncoderLayer.__call__
    monkeypatch.setattr(
        EncoderLayer, "__call__", lambda layer, x, **options: outputs.append(x) or call(layer, x, **options)
    )
    reference = dict(np.load(DATA / name / "reference.npz"))
    model = load_pretrained(DATA / name, dtype="float64")
    states = model(reference["wide_images"])
    for actual, expected in zip(outputs, reference["wide_hidden_states"], strict=False):
        assert relative_error(actual, expected) < 1e-10
    assert states.shape == (1, 21, 24)
    with raises_line(ShapeError, r"expected floating pixels \(batch, 3, height, width\), multiples of 4"):
        model(np.zeros((1, 3, 12, 14)))
    with raises_line(ConfigError, "resize_positions is true and positions 'rotary'; expected 'learned'"):
        xf.ImageEncoderConfig(positions="rotary", resize_positions=True)


def test_images_that_are_not_square_are_refused(tmp_path):
    directory = copy("vit", tmp_path, image_size=[12, 12])
    assert load_pretrained(directory).config.image_size == 12
    change_config(directory, image_size=[12, 16])
    with raises_line(CheckpointError, r"has image_size \[12, 16\]; expected a square"):
        load_pretrained(directory)


def test_what_dinov2_does_not_have_is_not_written(tmp_path):
    config = {**load_pretrained(DATA / "dinov2").config.to_dict(), "d_ff": 49}
    with raises_line(ConfigError, "dinov2: d_ff is 49 and d_model 24; dinov2 expects an integer mlp_ratio"):
        save_pretrained(xf.ImageEncoder(xf.ImageEncoderConfig(**config)), tmp_path, model_type="dinov2")
    config |= {"d_ff": 48, "layer_scale": False}
    with raises_line(ConfigError, "layer_scale"):
        save_pretrained(xf.ImageEncoder(xf.ImageEncoderConfig(**config)), tmp_path, model_type="dinov2")


def test_a_pooler_and_a_classifier_cannot_be_written_together(tmp_path):
    config = xf.ImageEncoderConfig(
        image_size=4, patch_size=2, d_model=4, num_heads=1, d_ff=4, num_layers=1, pooler="tanh", num_labels=2
    )
    with raises_line(ConfigError, r"vit: pooler is 'tanh' and num_labels 2; vit expects 'tanh' or a classifier"):
        save_pretrained(xf.ImageEncoder(config), tmp_path)


def test_inputs_that_are_no_images_of_the_model_are_refused():
    model = load_pretrained(DATA / "vit")
    for images in (np.zeros((1, 3, 12, 16)), np.zeros((3, 12, 12)), np.zeros((1, 3, 12, 12), dtype=np.uint8)):
        with raises_line(ShapeError, r"expected floating pixels \(batch, 3, 12, 12\)"):
            model(images)
    with raises_line(ConfigError, r"this model has no classifier \(num_labels is 0\)"):
        model.class_logits(model(np.zeros((1, 3, 12, 12))))
    with raises_line(ConfigError, "patch_size is 13; expected at most image_size 12"):
        xf.ImageEncoderConfig(image_size=12, patch_size=13)
    with raises_line(ConfigError, "patch_size is 5 and resize_positions true; expected a divisor of image_size 12"):
        xf.ImageEncoderConfig(image_size=12, patch_size=5, resize_positions=True)
