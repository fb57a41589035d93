"""GLM 4 (model types `glm` and `glm4`; GLM team, 2024 and 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import register
from xformer.families.layouts import Layout, attention, fused, same, transposed
from xformer.families.llama import LLAMA
from xformer.families.values import (
    SIZES,
    read_fields,
    read_rotary_decoder,
    write_rotary_decoder,
)
from xformer.models import LanguageModelConfig

_FIELDS = {**SIZES, "norm_epsilon": "rms_norm_eps", "attention_bias": "attention_bias"}
_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of GLM 4."""
    reader.skip("attention_dropout", "tie_word_embeddings")
    reader.require("hidden_act", "silu", "swish")
    return LanguageModelConfig(
        **read_fields(reader, _FIELDS, max_positions=131072, norm_epsilon=1.5625e-7, attention_bias=True),
        num_key_value_heads=reader.count("num_key_value_heads", default=2),
        head_dim=reader.count("head_dim", default=128),
        activation="swiglu",
        norm="rms",
        norm_position="sandwich" if reader.model_type == "glm4" else "pre",
        attention_output_bias=False,
        feed_forward_bias=False,
        **read_rotary_decoder(reader, fraction=0.5),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of `glm` or, with norms on both sides of sublayers, `glm4`."""
    is_glm4 = config.norm_position == "sandwich"
    model_type, architecture = ("glm4", "Glm4ForCausalLM") if is_glm4 else ("glm", "GlmForCausalLM")
    return {
        **write_rotary_decoder(config, model_type, architecture, _FIELDS, gated=True, writes_fraction=True),
        "head_dim": config.features_per_head,
    }


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    head_dim, names = config.features_per_head, "q_proj k_proj v_proj o_proj"
    rotated = head_dim, int(head_dim * config.rotary_fraction)
    gate, up = (f"{_OURS}feed_forward.{part}.weight" for part in ("gate", "up"))
    return {
        "model.embed_tokens.weight": same("embedding.weight"),
        **attention(_LAYER + "self_attn", _OURS + "self_attention", names, rotated=rotated),
        _LAYER + "input_layernorm.weight": same(_OURS + "self_attention_residual.norm.weight"),
        _LAYER + "post_self_attn_layernorm.weight": same(_OURS + "self_attention_residual.norm_after.weight"),
        _LAYER + "post_attention_layernorm.weight": same(_OURS + "feed_forward_residual.norm.weight"),
        _LAYER + "post_mlp_layernorm.weight": same(_OURS + "feed_forward_residual.norm_after.weight"),
        _LAYER + "mlp.gate_up_proj.weight": fused(gate, up, transpose=True),
        _LAYER + "mlp.down_proj.weight": transposed(_OURS + "feed_forward.down.weight"),
        "model.norm.weight": same("norm.weight"),
        "lm_head.weight": transposed("output.weight"),
    }


GLM = register(
    replace(
        LLAMA,
        model_types=("glm", "glm4"),
        read_config=read_config,
        write_config=write_config,
        tensors=_tensors,
    )
)
