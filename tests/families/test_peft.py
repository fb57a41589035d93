"""Adapters in the format of PEFT, compared with checkpoints whose weights include their products."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import xformer as xf
from tests.checkpoints import DATA
from xformer.errors import CheckpointError, ConfigError
from xformer.layers.weights import adapters_of
from xformer.tree import with_fields

# Modules of torch that get an adapter; those of GPT-2 have the weight (in_features, out_features).
MODULES = {"llama": "q_proj v_proj down_proj", "gpt2": "c_attn c_proj", "opt": "k_proj fc1"}
MODULES |= {"gpt_neox": "query_key_value dense_h_to_4h", "phi3": "qkv_proj gate_up_proj", "bart": "q_proj out_proj fc2"}
MODULES |= {"cohere": "q_proj k_proj down_proj", "glm4": "k_proj gate_up_proj"}
RANK, ALPHA = 3, 6


def write(model_type, directory, **changes):
    """Write adapters, and the checkpoint with them in its weights; return both directories."""
    adapters, merged = directory / "adapters", directory / "merged"
    shutil.copytree(DATA / model_type, merged)
    adapters.mkdir()
    tensors, matrices, rng = load_file(merged / "model.safetensors"), {}, np.random.default_rng(0)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in MODULES[model_type].split() or weight.ndim != 2:
            continue
        rows, columns = weight.shape[::-1] if model_type != "gpt2" else weight.shape
        a, b = 0.2 * rng.normal(size=(RANK, rows)), rng.normal(size=(columns, RANK))
        update = ALPHA / RANK * b @ a
        tensors[name] = weight + (update.T if model_type == "gpt2" else update)  # in float64
        if changes.get("use_dora"):
            magnitude = matrices[f"base_model.model.{module}.lora_magnitude_vector"] = rng.uniform(0.5, 2.0, columns)
            magnitude = magnitude if model_type == "gpt2" else magnitude[:, None]
            axis = 0 if model_type == "gpt2" else 1
            tensors[name] *= magnitude / np.linalg.norm(tensors[name], axis=axis, keepdims=True)
        matrices |= {f"base_model.model.{module}.lora_{key}.weight": x for key, x in (("A", a), ("B", b))}
    save_file(tensors, merged / "model.safetensors", {"format": "pt"})
    save_file(matrices, adapters / "adapter_model.safetensors", {"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "use_dora": False} | changes
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    return adapters, merged


def logits(model):
    ids = np.random.default_rng(1).integers(4, 30, (2, 6))
    return model(ids) if isinstance(model, xf.LanguageModel) else model(ids, ids[:, :4])


@pytest.mark.parametrize(
    ("model_type", "use_dora"), [*((each, False) for each in MODULES), ("gpt2", True), ("glm4", True), ("cohere", True)]
)
def test_adapters_of_peft(model_type, use_dora, tmp_path):
    adapters, merged = write(model_type, tmp_path, use_dora=use_dora)
    base = xf.load_pretrained(DATA / model_type, dtype="float64")
    expected = logits(xf.load_pretrained(merged, dtype="float64"))
    model = xf.load_lora(base, adapters)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits(model), expected, rtol=0, atol=1e-12 * scale)
    assert np.abs(logits(base) - expected).max() > 1e-3 * scale
    np.testing.assert_allclose(logits(xf.merge_lora(model)), logits(model), rtol=0, atol=1e-12 * scale)
    xf.save_lora(model, tmp_path / "again")
    again = xf.load_lora(base, tmp_path / "again")
    np.testing.assert_array_equal(logits(again), logits(model))
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["use_dora"] is use_dora
    written, original = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "again", adapters))
    assert written.keys() == original.keys()
    for name, x in original.items():
        np.testing.assert_array_equal(written[name], x)


def test_ranks_and_scales_of_single_modules(tmp_path):
    adapters, _ = write("llama", tmp_path, alpha_pattern={"q_proj": 12.0}, use_rslora=True)
    model = xf.load_lora(xf.load_pretrained(DATA / "llama"), adapters)
    scales = {name.rpartition(".")[2]: weight.scaling for name, weight in adapters_of(model).items()}
    assert scales == {"query": 12 / 3**0.5, "value": 6 / 3**0.5, "down": 6 / 3**0.5}


def test_adapters_of_a_quantized_model(tmp_path):
    adapters, _ = write("llama", tmp_path)
    base = xf.load_pretrained(DATA / "llama")
    model, expected = xf.load_lora(base.quantize(), adapters), logits(xf.load_lora(base, adapters))
    assert np.abs(logits(model) - expected).max() < 0.15 * np.abs(expected).max()
    np.testing.assert_allclose(logits(xf.merge_lora(model)), logits(model), rtol=0, atol=1e-4)
    (tmp_path / "dora").mkdir()
    adapters, _ = write("llama", tmp_path / "dora", use_dora=True)
    with pytest.raises(ConfigError, match="the model is quantized; use_dora expects floating weights"):
        xf.load_lora(base.quantize(), adapters)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "has adapters of type 'IA3'; expected 'LORA'"),
        ({"bias": "all"}, "has bias 'all'; expected 'none'"),
        ({"modules_to_save": ["lm_head"]}, r"has modules_to_save \['lm_head'\]; expected None"),
        ({"r": 0}, "has r 0; expected a positive number"),
        ({"lora_alpha": "6"}, "has lora_alpha '6'; expected a positive number"),
        ({"rank_pattern": {"(": 3}}, r"has rank_pattern .*; expected regular expressions"),
        ({"kasa_config": {"beta": 1e-4}}, r"has kasa_config .*; expected None"),
        ({"init_lora_weights": "corda"}, "has init_lora_weights 'corda', which changes the weights of the base model"),
        ({"alora_invocation_tokens": [1]}, r"has alora_invocation_tokens \[1\]; expected None"),
        ({"r": 4}, r"has shapes \(3, \d+\) and \(\d+, 3\); expected \(4, "),
    ],
)
def test_settings_that_are_not_supported(changes, message, tmp_path):
    adapters, _ = write("llama", tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        xf.load_lora(xf.load_pretrained(DATA / "llama"), adapters)


def test_magnitudes_that_do_not_fit(tmp_path):
    adapters, _ = write("llama", tmp_path, use_dora=True)
    base, path = xf.load_pretrained(DATA / "llama"), adapters / "adapter_config.json"
    model = xf.load_lora(base, adapters)
    plain = with_fields(model.layers[0].self_attention.query.weight, magnitude=None)
    query = with_fields(model.layers[0].self_attention.query, weight=plain)
    layer = with_fields(model.layers[0], self_attention=with_fields(model.layers[0].self_attention, query=query))
    with pytest.raises(ConfigError, match=r"the adapter of .*query has no magnitude, and others have one"):
        xf.save_lora(with_fields(model, layers=(layer, *model.layers[1:])), tmp_path / "out")
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": False}))
    with pytest.raises(CheckpointError, match="has the tensors lora_A, lora_B, lora_magnitude_vector; expected"):
        xf.load_lora(base, adapters)
    path.write_text(json.dumps({**json.loads(path.read_text()), "use_dora": True}))
    tensors = load_file(adapters / "adapter_model.safetensors")
    short = {name: x[:3] if "magnitude" in name else x for name, x in tensors.items()}
    save_file(short, adapters / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"has shapes \(3, \d+\) and \(\d+, 3\) and \(3,\); expected "):
        xf.load_lora(base, adapters)


def test_adapters_of_another_model(tmp_path):
    adapters, _ = write("llama", tmp_path)
    with pytest.raises(CheckpointError, match=r"has an adapter of model\.layers\.0.*, which the model does not have"):
        xf.load_lora(xf.load_pretrained(DATA / "gpt2"), adapters)
    model = xf.load_lora(xf.load_pretrained(DATA / "llama"), adapters)
    with pytest.raises(ConfigError, match=r"the model has adapters; use merge_lora\(model\)"):
        xf.load_lora(model, adapters)
    with pytest.raises(CheckpointError, match=r"cannot read adapter configuration"):
        xf.load_lora(xf.load_pretrained(DATA / "llama"), tmp_path / "nothing")
    with pytest.raises(ConfigError, match="the model has no adapters"):
        xf.save_lora(xf.load_pretrained(DATA / "llama"), tmp_path / "out")


def test_other_trained_arrays_are_not_dropped(tmp_path):
    model = xf.lora(xf.load_pretrained(DATA / "llama"))
    with pytest.raises(ConfigError, match=r"norm\.weight is trainable, which adapters do not include"):
        xf.save_lora(with_fields(model, norm=xf.unfreeze(model.norm)), tmp_path / "out")
    with pytest.raises(ConfigError, match="model_type is None, as the model was not loaded from a checkpoint"):
        xf.save_lora(xf.lora(xf.LanguageModel(model.config, seed=0)), tmp_path / "out")


def test_trained_adapters_of_one_matrix_are_refused(tmp_path):
    """GPT-2's queries, keys and values have one weight, and so one lora_a in PEFT."""
    model = xf.lora(xf.load_pretrained(DATA / "gpt2"), 2)
    with pytest.raises(ConfigError, match=r"c_attn of gpt2 is one matrix, and the adapters of .* differ in lora_a"):
        xf.save_lora(model, tmp_path)
    model = xf.lora(xf.load_pretrained(DATA / "gpt2"), 2, targets=("query", "down"))
    with pytest.raises(ConfigError, match=r"gpt2 has no separate module for the adapter of .*query; use merge_lora"):
        xf.save_lora(model, tmp_path)


def test_frozen_arrays_are_saved(tmp_path):
    model = xf.load_pretrained(DATA / "llama")
    xf.save_pretrained(xf.freeze(model), tmp_path / "frozen")
    np.testing.assert_array_equal(logits(xf.load_pretrained(tmp_path / "frozen")), logits(model))
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot create"):
        xf.save_lora(xf.lora(model), tmp_path / "file" / "adapters")
