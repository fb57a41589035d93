"""Outputs of tiny checkpoints of encoders of texts equal those of transformers (see make_references.py)."""

import dataclasses

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoints import DATA, copy, relative_error
from tests.families.test_parity import check_round_trip
from xformer.backends import from_host, resolve
from xformer.errors import CheckpointError, ConfigError, ShapeError
from xformer.families import load_pretrained, save_pretrained
from xformer.layers import ConvolutionEncoderLayer, EncoderLayer
from xformer.models import Encoder, EncoderConfig

CASES = [
    path.name for path in sorted(DATA.iterdir()) if not {"greedy", "images"} & {*np.load(path / "reference.npz").files}
]


def run(name, **options):
    reference = dict(np.load(DATA / name / "reference.npz"))
    model = load_pretrained(DATA / name, **options)
    return model, model(reference["tokens"], token_types=reference.get("token_types")), reference


@pytest.mark.parametrize("name", CASES)
def test_states_of_every_layer_and_heads_equal_those_of_transformers(name, monkeypatch, tmp_path):
    outputs = []
    for cls in (EncoderLayer, ConvolutionEncoderLayer):

        def record(layer, *args, cls=cls, call=cls.__call__, **options):
            y = call(layer, *args, **options)
            outputs.extend([y] if type(layer) is cls else [])
            return y

        monkeypatch.setattr(cls, "__call__", record)
    model, states, reference = run(name, dtype="float64")
    is_token = reference["tokens"] != model.config.pad_id
    # If there is a final norm, transformers returns the last state after it.
    for actual, expected in zip([*outputs[:-1], states], reference["hidden_states"][1:], strict=True):
        assert relative_error(actual[is_token], expected[is_token]) < 1e-10
    if "pooled" in reference:
        assert relative_error(model.pooler(states), reference["pooled"]) < 1e-10
    if model.masked_lm is not None:
        logits = model.masked_lm_logits(states)
        assert relative_error(logits[is_token], reference["logits"][is_token]) < 1e-10
    if model.classifier is not None:
        assert relative_error(model.class_logits(states, mask=is_token), reference["logits"]) < 1e-10
    check_round_trip(name, model, tmp_path)


def test_old_names_of_norms_are_read(tmp_path):
    path = copy("bert_masked_lm", tmp_path) / "model.safetensors"
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): x
        for name, x in load_file(path).items()
    }
    assert any(name.endswith("gamma") for name in tensors)
    save_file(tensors, path)
    model, (_, states, _) = load_pretrained(path.parent), run("bert_masked_lm")
    reference = np.load(DATA / "bert_masked_lm" / "reference.npz")
    np.testing.assert_array_equal(model(reference["tokens"], token_types=reference["token_types"]), states)


@pytest.mark.parametrize("name", ["albert_classifier", "modernbert_classifier", "deberta_v2_classifier"])
@pytest.mark.parametrize("xp", ["numpy", "array_api_strict", "torch", "jax"])
def test_encoders_run_on_every_library(name, xp):
    pytest.importorskip(xp)
    model, states, reference = run(name, xp=xp, dtype="float32")
    is_token = from_host(resolve(xp), reference["tokens"] != model.config.pad_id)
    assert relative_error(np.asarray(model.class_logits(states, mask=is_token)), reference["logits"]) < 1e-5


def test_the_mean_of_tokens_needs_a_mask():
    model, states, reference = run("modernbert_classifier")
    with pytest.raises(ConfigError, match="pass a mask, True = token"):
        model.class_logits(states)
    mask = reference["tokens"] != model.config.pad_id
    for each in (mask, mask.tolist(), mask[:, None, None, :]):
        np.testing.assert_allclose(model.class_logits(states, mask=each), reference["logits"], rtol=0, atol=1e-5)
    with pytest.raises(ShapeError, match=r"mask has shape \(2, 8\); expected \(2, 9\)"):
        model.class_logits(states, mask=mask[:, 1:])
    for other in (reference["tokens"], mask.astype(np.float32), mask.astype(int).tolist()):
        with pytest.raises(ShapeError, match=r"mask has dtype (int|float)\d\d; expected bool, True = token"):
            model.class_logits(states, mask=other)


@pytest.mark.parametrize(("changes", "match"), [
    ({"share_layers": True, "layer_types": ["full_attention"] * 2}, "share_layers is true; expected no layer_types"),
    ({"share_layers": True, "num_experts": 2, "dense_layers": (0,)},
     "share_layers is true; expected no layer_types, no dense_layers, and first_norm true"),
    ({"first_norm": False, "norm_position": "post"}, "first_norm is false, norm_position 'post'"),
    ({"relative_bias": True, "positions": "rotary"}, "relative_bias is true and positions 'rotary'"),
    ({"pooling": "mean"}, "pooling is 'mean', .* and pooler 'none'; expected a linear pooler"),
])  # fmt: skip
def test_fields_that_exclude_each_other_are_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        EncoderConfig(vocab_size=9, num_layers=2, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("roberta_masked_lm", {"pad_id": 0}, "pad_id is 0; roberta expects 1"),
        ("mpnet", {"relative_max_distance": 64}, "relative_max_distance is 64; expected 128"),
        ("modernbert", {"norm": "rms"}, "norm is 'rms'; expected 'layer'"),
    ],
)
def test_a_configuration_that_a_family_lacks_is_not_written(name, changes, match, tmp_path):
    config = dataclasses.replace(load_pretrained(DATA / name).config, **changes)
    with pytest.raises(ConfigError, match=match):
        save_pretrained(Encoder(config), tmp_path, model_type=name.split("_")[0])


@pytest.mark.parametrize(
    ("name", "pad_id"), [("bert", 0), ("deberta_v2", 0), ("mpnet", 1), ("distilbert_masked_lm", 0)]
)
def test_padding_that_no_file_names_is_that_of_transformers(name, pad_id, tmp_path):
    assert load_pretrained(copy(name, tmp_path, pad_token_id=None)).config.pad_id == pad_id


def test_a_convolution_needs_a_mask_of_keys():
    model, states, reference = run("deberta_v2_convolution", dtype="float64")
    is_token = reference["tokens"] != model.config.pad_id
    again = model(reference["tokens"], mask=is_token[:, None, None, :])
    np.testing.assert_allclose(again[is_token], states[is_token], rtol=0, atol=1e-12)
    short = model(reference["tokens"][1:, :6])  # the padding of the second row has no effect
    np.testing.assert_allclose(short[0], states[1, :6], rtol=0, atol=1e-12)
    with pytest.raises(ShapeError, match=r"mask has shape \(9, 9\) .*; expected \(2, 1, 1, 9\) for .* a convolution"):
        model(reference["tokens"], mask=np.ones((9, 9), bool))


def test_variants_of_deberta_that_xformer_does_not_compute_are_refused(tmp_path):
    for key, value in (("conv_groups", 2), ("pos_att_type", "c2p"), ("share_att_key", None), ("position_buckets", -1)):
        with pytest.raises(CheckpointError, match=f"has {key}"):
            load_pretrained(copy("deberta_v2", tmp_path / key, **{key: value}))


@pytest.mark.parametrize("name", ["bert_classifier", "modernbert_classifier"])
def test_a_classifier_of_tokens_is_refused(name, tmp_path):
    kind = "BertForTokenClassification" if name == "bert_classifier" else "ModernBertForTokenClassification"
    with pytest.raises(CheckpointError, match="has a classifier of tokens"):
        load_pretrained(copy(name, tmp_path, architectures=[kind]))
