"""ERNIE 4.5 without experts (Baidu, 2025): Llama with rotary positions of neighboring features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import register
from xformer.families.layouts import Layout, attention, feed_forward, same, transposed
from xformer.families.llama import LLAMA
from xformer.families.values import (
    SIZES,
    read_fields,
    read_rotary_decoder,
    write_rotary_decoder,
)
from xformer.models import LanguageModelConfig

_FIELDS = {**SIZES, "norm_epsilon": "rms_norm_eps", "attention_bias": "use_bias"}
_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of ERNIE 4.5."""
    reader.skip("tie_word_embeddings")
    reader.require("hidden_act", "silu", "swish")
    reader.require("compression_ratio", 1.0)
    fields = read_fields(reader, _FIELDS, max_positions=131072, norm_epsilon=1e-5, attention_bias=False)
    return LanguageModelConfig(
        **fields,
        num_key_value_heads=reader.count("num_key_value_heads", default=fields["num_heads"]),
        head_dim=reader.count("head_dim", default=128),
        activation="swiglu",
        norm="rms",
        feed_forward_bias=fields["attention_bias"],
        **read_rotary_decoder(reader, theta=5e5),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of ERNIE 4.5."""
    return {
        **write_rotary_decoder(config, "ernie4_5", "Ernie4_5ForCausalLM", _FIELDS, gated=True),
        "head_dim": config.features_per_head,
    }


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    head_dim, names = config.features_per_head, "q_proj k_proj v_proj o_proj"
    return {
        "model.embed_tokens.weight": same("embedding.weight"),
        **attention(_LAYER + "self_attn", _OURS + "self_attention", names, rotated=(head_dim, head_dim)),
        _LAYER + "input_layernorm.weight": same(_OURS + "self_attention_residual.norm.weight"),
        _LAYER + "post_attention_layernorm.weight": same(_OURS + "feed_forward_residual.norm.weight"),
        **feed_forward(_LAYER + "mlp", _OURS + "feed_forward"),
        "model.norm.weight": same("norm.weight"),
        "lm_head.weight": transposed("output.weight"),
    }


ERNIE = register(
    replace(
        LLAMA,
        model_types=("ernie4_5",),
        read_config=read_config,
        write_config=write_config,
        tensors=_tensors,
    )
)
