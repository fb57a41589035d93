"""Errors of configurations name the invalid field and the expected value."""

from __future__ import annotations

import json
from typing import get_args, get_type_hints

from tests.reference import for_each, raises_line
from xformer import EncoderConfig, ImageEncoderConfig, LanguageModelConfig, TransformerConfig
from xformer.config import options_of
from xformer.errors import ConfigError

SIZES = {"source_vocab_size": 11, "target_vocab_size": 13}


def test_a_configuration_survives_json():
    config = TransformerConfig(**SIZES, d_model=64, num_heads=4, norm_position="post", activation="gelu")
    assert TransformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@for_each(
    "values, message",
    [
        ({"d_model": 10, "num_heads": 4}, "d_model 10 is not divisible by num_heads 4"),
        ({"d_model": 0}, "d_model is 0; expected at least 1"),
        ({"d_model": 8.0}, "d_model is 8.0; expected an integer of at least 1"),
        ({"num_heads": "8"}, "num_heads is '8'; expected an integer of at least 1"),
        ({"num_heads": True}, "num_heads is True; expected an integer of at least 1"),
        ({"d_ff": None}, "d_ff is None; expected an integer of at least 1"),
        ({"num_encoder_layers": -1}, "num_encoder_layers is -1; expected a number in \\[0, 10000\\]"),
        ({"source_vocab_size": 0}, "source_vocab_size is 0; expected at least 1"),
        ({"dropout": 1.0}, r"dropout is 1\.0; expected a number in \[0, 1\)"),
        ({"attention_dropout": -0.1}, r"attention_dropout is -0\.1; expected a number in"),
        ({"activation_dropout": float("nan")}, "activation_dropout is nan; expected a number in"),
        ({"dropout": "0.1"}, r"dropout is '0\.1'; expected a number"),
        ({"tie_output": "no"}, "tie_output is 'no'; expected true or false"),
        ({"scale_embeddings": 1}, "scale_embeddings is 1; expected true or false"),
        ({"norm_epsilon": 0.0}, r"norm_epsilon is 0\.0; expected a number in"),
        ({"norm_epsilon": "small"}, "norm_epsilon is 'small'; expected a number in"),
        ({"activation": "swish"}, "activation is 'swish'; expected one of 'relu', 'gelu', 'gelu_tanh'"),
        ({"activation": ["relu"]}, r"activation is \['relu'\]; expected one of"),
        ({"norm": "batch"}, "norm is 'batch'; expected one of 'layer', 'max_scaled', 'rms'"),
        ({"positions": "absolute"}, "positions is 'absolute'; expected one of 'sinusoidal', 'learned', 'rotary',"),
        ({"positions": "rotary", "d_model": 9, "num_heads": 3}, "d_model / num_heads is 3; positions 'rotary'"),
        ({"positions": "rotary", "head_dim": 3}, "head_dim is 3; positions 'rotary' expects an even number"),
        ({"positions": "rotary", "head_dim": 10, "rotary_fraction": 0.5}, "rotary_fraction is 0.5 and rotates 5 of"),
        (
            {"layer_types": ("full_attention",), "num_encoder_layers": 2, "num_decoder_layers": 3},
            "layer_types has 1 entries; expected 3, one for each layer",
        ),
        (
            {"layer_types": ["full_attention"] * 4, "num_encoder_layers": 2, "num_decoder_layers": 3},
            "layer_types has 4 entries; expected 3, one for each layer",
        ),
        ({"num_key_value_heads": 3}, "num_heads 8 is not divisible by num_key_value_heads 3"),
        ({"window": 0}, "window is 0; expected at least 1"),
        ({"length_encoding": True, "pad_id": 2}, "length_encoding expects a pad_id that is neither"),
        ({"copy": True}, "copy is true and share_embeddings false"),
        ({"shared_norm": True}, "shared_norm is true and parallel_residual false; expected both, or no shared norm"),
        ({"share_relative_bias": False}, "share_relative_bias is false and positions 'sinusoidal'; expected 'rel"),
        ({"decoder_norm_before_positions": True}, "decoder_norm_before_positions is true and embedding_norm false;"),
        ({"norm_position": "middle"}, "norm_position is 'middle'; expected one of 'pre', 'post'"),
        ({"share_embeddings": True}, "source_vocab_size is 11, target_vocab_size 13 and share_e.*; expected equal"),
        ({"eos_id": 13}, "eos_id is 13; expected less than target_vocab_size 13"),
        ({"pad_id": 12}, "pad_id is 12; expected less than source_vocab_size 11"),
    ],
)
def test_invalid_values_are_refused(values, message):
    with raises_line(ConfigError, message):
        TransformerConfig(**{**SIZES, **values})


@for_each(
    "values, message",
    [
        ({**SIZES, "d_modle": 8}, "unknown key 'd_modle' in TransformerConfig; did you mean 'd_model'?"),
        ({**SIZES, "xyz": 8}, "unknown key 'xyz' in TransformerConfig; expected one of activation, "),
        ({"source_vocab_size": 8}, "TransformerConfig requires target_vocab_size"),
        ({}, "TransformerConfig requires source_vocab_size, target_vocab_size"),
        ([1], "TransformerConfig is a list; expected a table of names and values"),
    ],
)
def test_invalid_dictionaries_are_refused(values, message):
    with raises_line(ConfigError, message.replace("?", r"\?")):
        TransformerConfig.from_dict(values)


@for_each(
    "values, message",
    [
        ({"vocab_size": 0}, "vocab_size is 0; expected at least 1"),
        ({"vocab_size": 8, "num_layers": -1}, "num_layers is -1; expected a number in \\[0, 10000\\]"),
        ({"vocab_size": 8, "num_layers": 2, "layers_without_positions": [0, 2]}, r"layers_without_positions is \(0,"),
        ({"vocab_size": 8, "layers_without_positions": 1}, "layers_without_positions is 1; expected indices of layers"),
        ({"vocab_size": 8, "layers_without_positions": [True]}, r"layers_without_positions is \(True,\); expected"),
        ({"vocab_size": 8, "num_experts": 2, "num_experts_per_token": 3}, "num_experts_per_token is 3; expected at"),
        ({"vocab_size": 8, "num_experts": 1}, "num_experts_per_token is 2; expected at most num_experts, 1"),
        ({"vocab_size": 8, "num_experts": -1}, "num_experts is -1; expected at least 0"),
        ({"vocab_size": 8, "expert_d_ff": 4}, "expert_d_ff is 4 and num_experts 0; expected a number of experts"),
        ({"vocab_size": 8, "num_experts_per_token": 4}, "num_experts_per_token is 4 and num_experts 0; expected a num"),
        ({"vocab_size": 8, "router_bias": True}, "router_bias is true and num_experts 0; expected a number of exp"),
        ({"vocab_size": 8, "dense_layers": (0,)}, r"dense_layers is \(0,\) and num_experts 0; expected a number"),
        ({"vocab_size": 8, "num_experts": 4, "num_layers": 2, "dense_layers": [2]}, r"dense_layers is \(2,\);"),
        ({"vocab_size": 8, "num_experts": 4, "rematerialize": True}, "rematerialize is true; a model with experts"),
        ({"vocab_size": 8, "d_model": 10, "num_heads": 4}, "d_model 10 is not divisible by num_heads 4"),
    ],
)
def test_language_model_configurations_are_checked_too(values, message):
    with raises_line(ConfigError, message):
        LanguageModelConfig(**values)


def test_names_of_classes_survive_json_and_are_counted():
    config = EncoderConfig(vocab_size=8, num_labels=2, labels=["bad", "good"])
    assert EncoderConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with raises_line(ConfigError, "labels has 2 names; expected num_labels, 3"):
        EncoderConfig(vocab_size=8, num_labels=3, labels=("bad", "good"))
    for options in ({"convolution_size": 2}, {"convolution_size": 3, "causal": True}):
        with raises_line(ConfigError, "convolution_size is .*; expected an odd number without share_layers, parallel"):
            EncoderConfig(vocab_size=8, **options)


def _values(hint):
    """Return the values of a Literal, or of a union of them."""
    return {value for each in get_args(hint) for value in (_values(each) or {each})}


def test_types_of_choices_are_the_choices():
    for config in (EncoderConfig, ImageEncoderConfig, LanguageModelConfig, TransformerConfig):
        hints, choices = get_type_hints(config), {each[0]: each[-1].metadata["choices"] for each in options_of(config)}
        known = {name: set(values) for name, values in choices.items() if values and get_args(hints[name])}
        assert {"activation", "norm", "norm_position", "positions"} <= known.keys()
        assert known == {name: _values(hints[name]) for name in known}
