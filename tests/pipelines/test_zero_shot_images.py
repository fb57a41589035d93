"""Zero-shot classification of images with tiny CLIP and SigLIP models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import xformer as xf
from tests.reference import raises_line
from xformer.data.images import PROCESSOR_FILE
from xformer.errors import CheckpointError, ConfigError, DataError

pil = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")
DATA = Path(__file__).parent.parent / "families" / "data"
LABELS = ["cat", "red birds", "Dog"]
ROWS, COLUMNS = np.mgrid[:30, :40]
PICTURES = [
    np.stack([8 * ROWS, 6 * COLUMNS, 3 * (ROWS + COLUMNS)], axis=-1).astype(np.uint8),
    np.where((ROWS // 6 + COLUMNS // 8) % 2, 220, 30).astype(np.uint8),
]
# Probabilities that the pipeline of transformers computes for both pictures.
EXPECTED = {
    "clip": [[0.3333626, 0.3422204, 0.324417], [0.3320256, 0.3427345, 0.3252399]],
    "siglip": [[0.4211408, 0.4188936, 0.4206936], [0.3946756, 0.3949731, 0.3940152]],
    "siglip_masked": [[0.4193659, 0.4165574, 0.4191335], [0.3803632, 0.3837228, 0.3797733]],
}


def write_checkpoint(name: str, directory: Path) -> Path:
    """Write a checkpoint with a tokenizer and image settings: "clip", "siglip" or "siglip_masked"."""
    model = name.removesuffix("_masked")
    shutil.copytree(DATA / model, directory, dirs_exist_ok=True)
    words = ["this", "is", "a", "photo", "of", "cat", "dog", "two", "red", "birds", "."]
    ids = {"<pad>": 1, "<unk>": 2, "<s>": 59, "</s>": 60} | {word: 3 + i for i, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    inner.normalizer = tokenizers.normalizers.Lowercase()
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>" if model == "clip" else "$A </s>", special_tokens=[("<s>", 59), ("</s>", 60)]
    )
    inner.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "</s>"}
    settings |= {"pad_token": "</s>" if model == "clip" else "<pad>"}
    settings |= {"model_input_names": ["input_ids"]} if name == "siglip" else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"size": {"shortest_edge": 12}, "crop_size": {"height": 12, "width": 12}}
    sizes = sizes if model == "clip" else {"size": {"height": 15, "width": 15}}
    values = {"image_processor_type": "CLIPImageProcessor" if model == "clip" else "SiglipImageProcessor", **sizes}
    values |= {"resample": 3, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (directory / PROCESSOR_FILE).write_text(json.dumps(values))
    return directory


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("zero_shot")
    return {
        name: xf.ZeroShotImageClassifier.from_pretrained(write_checkpoint(name, directory / name)) for name in EXPECTED
    }


@pytest.mark.parametrize("name", EXPECTED)
def test_probabilities_are_those_of_transformers(classifiers, name, tmp_path):
    pil.fromarray(PICTURES[0]).save(tmp_path / "a.png")
    found = classifiers[name]([tmp_path / "a.png", pil.fromarray(PICTURES[1])], LABELS, batch_size=1)
    for each, expected in zip(found, EXPECTED[name], strict=True):
        assert list(each.probabilities) == LABELS
        np.testing.assert_allclose(list(each.probabilities.values()), expected, rtol=0, atol=1e-5)
        assert each.label == LABELS[int(np.argmax(expected))]
        assert each.probability == max(each.probabilities.values())


def test_labels_fill_the_template(classifiers):
    classifier, texts = classifiers["clip"], [f"this is a {label}" for label in LABELS]
    found = classifier(PICTURES, np.asarray(LABELS, dtype=object), template="This is a {}")
    for each, expected in zip(found, classifier(PICTURES, texts, template="{}"), strict=True):
        assert list(each.probabilities.values()) == list(expected.probabilities.values())
    assert classifier(PICTURES[:1], ["cat"])[0].probabilities == {"cat": 1.0}
    assert classifier([], LABELS) == []
    assert "ImageTextEncoder(" in repr(classifier)


def test_wrong_calls_are_refused(classifiers):
    for arguments, error, match in (
        ({"labels": "cat"}, DataError, "labels is a single text; expected a list of texts"),
        ({"labels": []}, DataError, r"labels is \[\]; expected at least one text"),
        ({"labels": ["cat", 3]}, DataError, r"got something that is not text \(3 in labels\)"),
        ({"labels": ["cat " * 9]}, DataError, "has 17 tokens; expected at most 10"),
        ({"template": "a photo"}, ConfigError, r"template is 'a photo'; expected a text with {} where a label goes"),
        ({"images": PICTURES[0]}, DataError, "images is an array of shape .*; expected a list of images"),
        ({"images": [__file__]}, DataError, "is no image that Pillow reads"),
        ({"candidate_labels": LABELS}, ConfigError, "got an unknown argument 'candidate_labels'; use labels"),
    ):  # fmt: skip
        with raises_line(error, match):
            classifiers["clip"](**{"images": PICTURES, "labels": LABELS, **arguments})


def test_checkpoints_that_do_not_fit_are_refused(classifiers, tmp_path):
    classifier = classifiers["siglip"]
    with raises_line(ConfigError, r"processor makes images of the size \(8, 8\); the model expects \(15, 15\)"):
        xf.ZeroShotImageClassifier(classifier.model, classifier.processor._replace(size=(8, 8)), classifier.tokenizer)
    with raises_line(ConfigError, "model is an ImageEncoder; expected an instance of ImageTextEncoder"):
        xf.ZeroShotImageClassifier(classifier.model.image, classifier.processor, classifier.tokenizer)
    directory = write_checkpoint("siglip", tmp_path)
    with raises_line(CheckpointError, "has an encoder of images and texts; Embedder expects .*; use ZeroShotImageC"):
        xf.Embedder.from_pretrained(directory)
    with raises_line(CheckpointError, "has an image encoder; ZeroShotImageClassifier expects an encoder of images and"):
        xf.ZeroShotImageClassifier.from_pretrained(DATA / "vit")
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": None}))
    with raises_line(CheckpointError, "names no pad_token; expected one, which texts are padded with"):
        xf.ZeroShotImageClassifier.from_pretrained(directory)
    (directory / "tokenizer.json").unlink()
    with raises_line(CheckpointError, "has no tokenizer that can be read"):
        xf.ZeroShotImageClassifier.from_pretrained(directory)
    (directory / PROCESSOR_FILE).unlink()
    with raises_line(CheckpointError, PROCESSOR_FILE):
        xf.ZeroShotImageClassifier.from_pretrained(directory)
