"""Models of xformer are written as checkpoints of families that compute the same."""

import dataclasses
import json

import numpy as np
import pytest

import xformer as xf
from tests.checkpoints import DATA, copy
from xformer.errors import ConfigError
from xformer.tree import replace

SMALL = {"d_model": 24, "num_heads": 4, "d_ff": 40, "dropout": 0.0}
TRANSLATOR = {
    **SMALL, "source_vocab_size": 61, "target_vocab_size": 61, "num_encoder_layers": 2, "num_decoder_layers": 2,
    "share_embeddings": True,
}  # fmt: skip
LANGUAGE_MODEL = {**SMALL, "vocab_size": 61, "num_layers": 2, "scale_embeddings": False}
LLAMA = {
    "norm": "rms", "activation": "swiglu", "positions": "rotary", "attention_bias": False, "feed_forward_bias": False,
}  # fmt: skip

MODELS = {
    "pegasus": xf.TransformerConfig(**TRANSLATOR),
    "marian": xf.TransformerConfig(**TRANSLATOR, norm_position="post", activation="silu", output_bias=True),
    "llama": xf.LanguageModelConfig(**LANGUAGE_MODEL, **LLAMA),
    "gpt2": xf.LanguageModelConfig(**LANGUAGE_MODEL, activation="gelu_tanh", positions="learned"),
}


def random_model(config):
    """Return a model whose biases and norms are random too."""
    rng = np.random.default_rng(0)
    model = (xf.Transformer if isinstance(config, xf.TransformerConfig) else xf.LanguageModel)(config)
    noise = {name: x + 0.2 * rng.standard_normal(x.shape) for name, x in model.named_parameters()}
    return replace(model, {name: x.astype(np.float32) for name, x in noise.items()})


@pytest.mark.parametrize("model_type", MODELS)
def test_an_exported_model_computes_the_same(model_type, tmp_path):
    model = random_model(MODELS[model_type])
    xf.save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == model_type
    again = xf.load_pretrained(tmp_path)
    inputs = [np.asarray([[5, 6, 7, 2], [9, 2, 0, 0]]), np.asarray([[1, 4, 5], [1, 7, 8]])]
    inputs = inputs[-1:] if isinstance(model, xf.LanguageModel) else inputs
    np.testing.assert_allclose(again(*inputs), model(*inputs), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("config", "match"), [
    (xf.TransformerConfig(**TRANSLATOR, copy=True), "copy is True; expected False"),
    (xf.TransformerConfig(**TRANSLATOR, activation="swiglu"), "activation is 'swiglu'; expected no gated one"),
    (xf.TransformerConfig(**TRANSLATOR, key_bias=False), "key_bias is False; expected True"),
    (xf.LanguageModelConfig(**LANGUAGE_MODEL, num_experts=2),
     r"format: it has experts; expected norm 'rms', .*, as in Mixtral; model.save\(path\) writes any model$"),
    (dataclasses.replace(MODELS["llama"], layer_scale=True),
     "format: the nearest family is llama: layer_scale is True; expected False$"),
    (dataclasses.replace(MODELS["gpt2"], activation="geglu"),
     "format: the nearest family is gpt2: activation is 'geglu'; expected no gated one$"),
    (dataclasses.replace(MODELS["gpt2"], attention_softcap=5.0, scale_embeddings=True),
     "family is gpt2: attention_softcap is 5.0; expected None; scale_embeddings is True; expected False$"),
])  # fmt: skip
def test_a_model_of_no_family_is_refused_with_the_name_of_the_field(config, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        xf.save_pretrained(random_model(config), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_partial_rotary_positions_are_written_in_a_family_that_has_them(tmp_path):
    config = dataclasses.replace(MODELS["llama"], head_dim=8, rotary_fraction=0.5)
    model = random_model(config)
    with pytest.raises(ConfigError, match=r"partial_rotary_factor 0\.5; models of type llama expect 1"):
        xf.save_pretrained(model, tmp_path, model_type="llama")
    xf.save_pretrained(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "glm"
    np.testing.assert_allclose(xf.load_pretrained(tmp_path)([[5, 9, 8, 4]]), model([[5, 9, 8, 4]]), rtol=0, atol=2e-5)


def test_gemma_is_written_with_the_integer_that_transformers_expects(tmp_path):
    model = xf.load_pretrained(DATA / "gemma2")
    xf.save_pretrained(model, tmp_path)
    scalar = json.loads((tmp_path / "config.json").read_text())["query_pre_attn_scalar"]
    assert (scalar, type(scalar)) == (6, int)
    config = dataclasses.replace(model.config, attention_scale=0.3)
    with pytest.raises(ConfigError, match=r"attention_scale is 0\.3; expected 1 / sqrt"):
        xf.save_pretrained(xf.LanguageModel(config), tmp_path, model_type="gemma2")


@pytest.mark.parametrize("name", ["ministral", "qwen2_window", "gemma3", "olmo3"])
@pytest.mark.parametrize("types", ["fff", "sss", "fsf"])
def test_windows_in_any_layers_are_written(name, types, tmp_path):
    names = {"f": "full_attention", "s": "sliding_attention"}
    config = dataclasses.replace(
        xf.load_pretrained(DATA / name).config, num_layers=3, window=4, layer_types=tuple(map(names.get, types))
    )
    model = random_model(config)
    xf.save_pretrained(model, tmp_path)
    again, tokens = xf.load_pretrained(tmp_path), [[5, 9, 8, 4, 7, 11, 6, 3]]
    assert [layer.self_attention.window for layer in again.layers] == [None if t == "f" else 4 for t in types]
    np.testing.assert_allclose(again(tokens), model(tokens), rtol=0, atol=2e-5)
    values = json.loads((tmp_path / "config.json").read_text())
    if values["model_type"] in ("llama", "mistral", "olmo2"):  # have no layer_types
        assert (values["model_type"] == "mistral") == (types == "sss")
        assert values.get("sliding_window") == (4 if types == "sss" else None)
    else:
        assert values["layer_types"] == [names[t] for t in types]
    if "qwen" in name:
        assert (values["use_sliding_window"], values["max_window_layers"]) == (types != "fff", f"{types}s".index("s"))


@pytest.mark.parametrize("is_scaled", [False, True])
def test_outputs_of_umt5_are_scaled_if_the_files_say_that_embeddings_are_tied(is_scaled, tmp_path):
    model = xf.load_pretrained(copy("umt5", tmp_path, tie_word_embeddings=is_scaled))
    assert model.config.scale_output is is_scaled
    xf.save_pretrained(model, tmp_path / "again")
    assert xf.load_pretrained(tmp_path / "again").config == model.config


@pytest.mark.parametrize(
    ("field", "value"), [("attention_softcap", 5.0), ("norm_position", "sandwich"), ("norm_epsilon", 1e-3)]
)
def test_a_family_writes_only_what_reading_gives_back(field, value, tmp_path):
    config = xf.LanguageModelConfig(**{**MODELS["gpt2"].to_dict(), field: value})
    model = xf.LanguageModel(config)
    if field == "norm_epsilon":
        xf.save_pretrained(model, tmp_path / "out", model_type="gpt2")
        assert xf.load_pretrained(tmp_path / "out").config.norm_epsilon == config.norm_epsilon
    else:
        with pytest.raises(ConfigError, match=field):
            xf.save_pretrained(model, tmp_path / "out", model_type="gpt2")
