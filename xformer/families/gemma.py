"""Gemma 2 and the text models of Gemma 3 (Gemma team, 2024 and 2025)."""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import RMS_SIZES, SANDWICH_NORMS, decoder, decoder_family
from xformer.families.layouts import Layout, plus_one
from xformer.families.values import (
    every_nth_full,
    read_activation,
    read_fields,
    read_local_theta,
    read_output,
    read_rope,
    read_windows,
    write_decoder,
    write_local_rope,
    write_rope,
    write_windows,
)
from xformer.models import LanguageModelConfig

_FIELDS = {**RMS_SIZES, "attention_bias": "attention_bias"}


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of Gemma 2 or 3."""
    reader.require("use_bidirectional_attention", False)
    reader.skip("cache_implementation")
    activation = read_activation(reader, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    if activation != "gelu_tanh":
        raise CheckpointError(f"{reader.path} has the activation {activation!r}; expected 'gelu_pytorch_tanh'")
    reader.skip("hidden_act")  # hidden_activation replaces it
    fields = read_fields(reader, _FIELDS, max_positions=8192, norm_epsilon=1e-6, attention_bias=False)
    is_gemma3, num_layers = reader.model_type == "gemma3_text", fields["num_layers"]
    pattern = reader.count("sliding_window_pattern", "_sliding_window_pattern", default=6 if is_gemma3 else 2)
    local_theta = read_local_theta(reader, default=reader.number("rope_local_base_freq", default=10000.0))
    return LanguageModelConfig(
        **fields,
        num_key_value_heads=reader.count("num_key_value_heads"),
        head_dim=reader.count("head_dim", default=256),
        activation="geglu_tanh",
        norm="rms",
        norm_position="sandwich",
        qk_norm=is_gemma3,
        feed_forward_bias=False,
        attention_scale=reader.number("query_pre_attn_scalar", default=256) ** -0.5,
        attention_softcap=reader.number("attn_logit_softcapping", default=None),
        logits_softcap=reader.number("final_logit_softcapping", default=None),
        positions="rotary",
        rope_local_theta=local_theta if is_gemma3 else None,
        scale_embeddings=True,
        **read_windows(reader, every_nth_full(num_layers, pattern), default_window=4096),
        **read_rope(reader, theta=1e6 if is_gemma3 else 1e4),
        **read_output(reader),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of Gemma 2 or, with norms of queries and keys, Gemma 3."""
    is_gemma3 = config.qk_norm
    model_type, architecture = ("gemma3_text", "Gemma3ForCausalLM") if is_gemma3 else ("gemma2", "Gemma2ForCausalLM")
    rope = write_local_rope(config) if is_gemma3 else {"rope_parameters": write_rope(config)["rope_parameters"]}
    scale = config.attention_scale or config.features_per_head**-0.5
    scalar = round(scale**-2)  # transformers expects an integer
    if abs(scale**-2 - scalar) > 1e-6 * scalar:
        raise ConfigError(f"attention_scale is {scale}; expected 1 / sqrt(n) with an integer n")
    return {
        **write_decoder(config, model_type, architecture, _FIELDS),
        "num_key_value_heads": config.num_key_value_heads or config.num_heads,
        "head_dim": config.features_per_head,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logits_softcap,
        **rope,
        **write_windows(config),
    }


def _norm(tensor: str, parameter: str) -> dict[str, Layout]:
    return {f"{tensor}.weight": plus_one(f"{parameter}.weight")}


GEMMA = decoder_family(
    model_types=("gemma2", "gemma3_text"),
    read_config=read_config,
    write_config=write_config,
    tensors=decoder(SANDWICH_NORMS, _norm),
)
