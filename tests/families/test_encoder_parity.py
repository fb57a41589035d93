"""Outputs of tiny BERT, RoBERTa and DistilBERT checkpoints equal those of transformers (see make_references.py)."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from xformer.families import load_pretrained
from xformer.layers import EncoderLayer

DATA = Path(__file__).parent / "data"
CASES = sorted(
    path.name for path in DATA.iterdir() if path.name.startswith(("bert", "roberta", "xlm_roberta", "distilbert"))
)


def run(name, **options):
    reference = dict(np.load(DATA / name / "reference.npz"))
    model = load_pretrained(DATA / name, **options)
    return model, model(reference["tokens"], token_types=reference.get("token_types")), reference


def relative_error(actual, expected) -> float:
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-10), ("float32", 1e-5)])
def test_states_and_heads_equal_those_of_transformers(name, dtype, tolerance):
    model, states, reference = run(name, dtype=dtype)
    is_token = reference["tokens"] != model.config.pad_id
    assert relative_error(states[is_token], reference["hidden_states"][-1][is_token]) < tolerance
    if "pooled" in reference:
        assert relative_error(model.pooler(states), reference["pooled"]) < tolerance
    if model.masked_lm is not None:
        logits = model.masked_lm_logits(states)
        assert relative_error(logits[is_token], reference["logits"][is_token]) < tolerance
    if model.classifier is not None:
        assert relative_error(model.class_logits(states), reference["logits"]) < tolerance


@pytest.mark.parametrize("name", CASES)
def test_states_of_every_layer_equal_those_of_transformers(name, monkeypatch):
    outputs, call = [], EncoderLayer.__call__
    monkeypatch.setattr(
        EncoderLayer, "__call__", lambda *args, **options: outputs.append(call(*args, **options)) or outputs[-1]
    )
    model, _, reference = run(name, dtype="float64")
    is_token = reference["tokens"] != model.config.pad_id
    for actual, expected in zip(outputs, reference["hidden_states"][1:], strict=True):
        assert relative_error(actual[is_token], expected[is_token]) < 1e-10


def test_old_names_of_norms_are_read(tmp_path):
    shutil.copytree(DATA / "bert_masked_lm", tmp_path / "old")
    path = tmp_path / "old" / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in load_file(path).items()
    }
    assert any(name.endswith("gamma") for name in tensors)
    save_file(tensors, path)
    model, (_, states, _) = load_pretrained(tmp_path / "old"), run("bert_masked_lm")
    reference = np.load(DATA / "bert_masked_lm" / "reference.npz")
    np.testing.assert_array_equal(model(reference["tokens"], token_types=reference["token_types"]), states)


@pytest.mark.parametrize("xp", ["array_api_strict", "torch", "jax"])
def test_encoders_run_on_every_library(xp):
    pytest.importorskip(xp)
    model, states, reference = run("bert_classifier", xp=xp, dtype="float32")
    assert relative_error(np.asarray(model.class_logits(states)), reference["logits"]) < 1e-5
