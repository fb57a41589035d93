"""Classification of images with a tiny Vision Transformer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.reference import normal, raises_line
from xformer.data.images import PROCESSOR_FILE, ImageProcessor
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.tree import map_arrays

pytest.importorskip("PIL")
DATA = Path(__file__).parent.parent / "families" / "data"
PICTURES = [np.clip(128 + 60 * normal(seed, 20, 30, 3), 0, 255).astype(np.uint8) for seed in range(5)]
SETTINGS = {"image_processor_type": "ViTImageProcessor", "size": {"height": 12, "width": 12}}
SETTINGS |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Write a tiny classifier of three classes with its image settings."""
    directory = tmp_path_factory.mktemp("vit")
    config = xf.ImageEncoderConfig(
        image_size=12, patch_size=4, d_model=8, num_heads=2, d_ff=16, num_layers=2, num_labels=3,
        labels=("cat", "dog", "owl"), norm_epsilon=1e-12, attention_output_bias=True, dropout=0.0,
    )  # fmt: skip
    model = xf.ImageEncoder(config, seed=1)
    xf.save_pretrained(map_arrays(lambda x: 2.0 * x, model), directory)
    (directory / PROCESSOR_FILE).write_text(json.dumps(SETTINGS))
    return directory


def test_classes_are_those_of_the_model(vit):
    classifier = xf.ImageClassifier.from_pretrained(vit)
    found = classifier(PICTURES, batch_size=2)
    model, pixels = xf.load_pretrained(vit), ImageProcessor.from_pretrained(vit)(PICTURES)
    logits = np.asarray(model.class_logits(model(pixels)), np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for each, row in zip(found, expected, strict=True):
        np.testing.assert_allclose(list(each.probabilities.values()), row, rtol=1e-4)
        assert each.label == ("cat", "dog", "owl")[int(row.argmax())]
        assert each.probability == max(each.probabilities.values())
    assert classifier([]) == []
    assert "cat" in repr(classifier)
    renamed = xf.ImageClassifier(classifier.model, classifier.processor, labels=["a", "b", "c"])
    assert set(renamed(PICTURES[:1])[0].probabilities) == {"a", "b", "c"}


def test_models_that_resize_positions_accept_other_sizes(tmp_path):
    directory = shutil.copytree(DATA / "dinov2", tmp_path / "dinov2")
    settings = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 20}, "crop_size": 16}
    (directory / PROCESSOR_FILE).write_text(json.dumps({**SETTINGS, **settings}))
    classifier = xf.ImageClassifier.from_pretrained(directory)
    assert classifier.processor.crop == (16, 16)
    assert len(classifier(PICTURES)) == len(PICTURES)


def test_models_and_images_that_do_not_fit_are_refused(vit, tmp_path):
    classifier = xf.ImageClassifier.from_pretrained(vit)
    with raises_line(DataError, "images is .*; expected a list of images"):
        classifier(PICTURES[0])
    with raises_line(ConfigError, "batch_size is 0; expected an integer of at least 1"):
        classifier(PICTURES, batch_size=0)
    with raises_line(ConfigError, r"processor makes images of the size \(8, 8\); the model expects \(12, 12\)"):
        xf.ImageClassifier(classifier.model, classifier.processor._replace(size=(8, 8)))
    with raises_line(ConfigError, "labels has 2 names for 3 classes"):
        xf.ImageClassifier(classifier.model, classifier.processor, labels=["a", "b"])
    without = shutil.copytree(DATA / "vit", tmp_path / "vit")
    (without / PROCESSOR_FILE).write_text(json.dumps(SETTINGS))
    with raises_line(ConfigError, r"no classifier \(num_labels is 0\); ImageClassifier expects a fine-tuned model"):
        xf.ImageClassifier.from_pretrained(without)
    with raises_line(CheckpointError, "has an image encoder; Classifier expects an encoder; use ImageClassifier"):
        xf.Classifier.from_pretrained(vit)
