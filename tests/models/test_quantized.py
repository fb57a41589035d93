"""Quantized models: every class, every library, generation, files, and the refusal to train or export them."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.reference import raises_line
from xformer import fit
from xformer.backends import to_host
from xformer.errors import ConfigError
from xformer.families import save_pretrained
from xformer.ops.weights import QuantizedWeight
from xformer.tree import map_modules, with_fields

SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 24}
MODELS = {
    "language_model": lambda: xf.LanguageModel(xf.LanguageModelConfig(vocab_size=13, num_layers=2, **SIZES)),
    "untied": lambda: xf.LanguageModel(
        xf.LanguageModelConfig(vocab_size=13, num_layers=1, tie_output=False, positions="rotary", **SIZES)
    ),
    "transformer": lambda: xf.Transformer(
        xf.TransformerConfig(
            source_vocab_size=13,
            target_vocab_size=13,
            num_encoder_layers=1,
            num_decoder_layers=1,
            share_embeddings=True,
            copy=True,
            **SIZES,
        )
    ),
    "encoder": lambda: xf.Encoder(
        xf.EncoderConfig(vocab_size=13, num_layers=1, num_token_types=2, masked_lm=True, num_labels=3, **SIZES)
    ),
}
IDS = [[5, 4, 7, 9]]


def outputs(model):
    if isinstance(model, xf.Transformer):
        return model(IDS, [[1, 7, 3]])
    if isinstance(model, xf.Encoder):
        return model.masked_lm_logits(model(IDS))
    return model(IDS)


def dequantized(model):
    """Return a model in float64 whose weights are those of a quantized one."""

    def dequantize_layer(layer):
        if not isinstance(getattr(layer, "weight", None), QuantizedWeight):
            return layer
        return with_fields(layer, weight=layer.weight.dequantize())

    return map_modules(dequantize_layer, model).to(dtype="float64")


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_dequantized_model(name, xp):
    original = MODELS[name]()
    model = original.quantize("int8")
    assert sum(x.nbytes for _, x in model.named_parameters()) < 0.5 * sum(
        x.nbytes for _, x in original.named_parameters()
    )
    expected = outputs(dequantized(model))
    assert_close(outputs(model.to(xp)), expected, xp=xp, dtype="float32", tolerance=1e-4)
    assert np.abs(outputs(original) - expected).max() < 0.1 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["language_model", "transformer"])
def test_a_file_restores_the_same_model(name, dtype, tmp_path):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    model = MODELS[name]().quantize(dtype)
    model.save(tmp_path / "model.safetensors")
    loaded = xf.load(tmp_path / "model.safetensors")
    for (first, a), (second, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert first == second
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(to_host(a), to_host(b))
    np.testing.assert_array_equal(outputs(model), outputs(loaded))


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["language_model", "transformer"])
def test_a_jitted_model_returns_the_bits_of_the_model(name, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    model = MODELS[name]().quantize(dtype)
    jitted = xf.jit(lambda model, *ids: model(*ids))
    for seed in range(4):
        ids = np.random.default_rng(seed).integers(3, 13, (2, 2, 5))[: 1 + (name == "transformer")]
        np.testing.assert_array_equal(jitted(model, *ids), model(*ids))


def test_quantized_models_are_neither_trained_nor_exported_nor_quantized_again(tmp_path):
    model = MODELS["language_model"]().quantize()
    assert model.quantize("int8") is model
    with raises_line(ConfigError, "the model is quantized to int8; quantize the original model to bfloat16"):
        model.quantize("bfloat16")
    with raises_line(ConfigError, "dtype is 'int4'; expected 'int8' or 'bfloat16'"):
        MODELS["encoder"]().quantize("int4")
    message = "the model is quantized to int8; expected floating weights"
    with raises_line(ConfigError, message):
        save_pretrained(model, tmp_path / "out")
    with raises_line(ConfigError, message):
        fit(model, lambda m, b, r: m(b).sum(), [IDS], optimizer=xf.Adam(), learning_rate=1e-3, steps=1)
