"""Nemotron and Minitron (Parmar et al., 2024; Muralidharan et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import register
from xformer.families.layouts import Layout, attention, feed_forward, plus_one, same, transposed
from xformer.families.llama import LLAMA
from xformer.families.values import (
    SIZES,
    read_activation,
    read_fields,
    read_heads,
    read_rotary_decoder,
    write_rotary_decoder,
)
from xformer.models import LanguageModelConfig

_FIELDS = {
    **SIZES,
    "norm_epsilon": "norm_eps",
    "attention_bias": "attention_bias",
    "feed_forward_bias": "mlp_bias",
}
_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of Nemotron."""
    reader.skip("attention_dropout", "tie_word_embeddings")
    fields = read_fields(
        reader, _FIELDS, max_positions=4096, norm_epsilon=1e-5, attention_bias=False, feed_forward_bias=False
    )
    return LanguageModelConfig(
        **fields,
        **read_heads(reader, fields),
        activation=read_activation(reader, "hidden_act", default="relu2"),
        **read_rotary_decoder(reader, fraction=0.5),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of Nemotron."""
    return {
        **write_rotary_decoder(config, "nemotron", "NemotronForCausalLM", _FIELDS, gated=False, writes_fraction=True),
        "head_dim": config.features_per_head,
    }


def _norm(tensor: str, parameter: str) -> dict[str, Layout]:
    """Return the layouts of a layer norm that multiplies by 1 + weight."""
    return {f"{tensor}.weight": plus_one(f"{parameter}.weight"), f"{tensor}.bias": same(f"{parameter}.bias")}


NEMOTRON = register(
    replace(
        LLAMA,
        model_types=("nemotron",),
        read_config=read_config,
        write_config=write_config,
        tensors={
            "model.embed_tokens.weight": same("embedding.weight"),
            **attention(_LAYER + "self_attn", _OURS + "self_attention", "q_proj k_proj v_proj o_proj"),
            **feed_forward(_LAYER + "mlp", _OURS + "feed_forward", "up_proj down_proj"),
            **_norm(_LAYER + "input_layernorm", _OURS + "self_attention_residual.norm"),
            **_norm(_LAYER + "post_attention_layernorm", _OURS + "feed_forward_residual.norm"),
            **_norm("model.norm", "norm"),
            "lm_head.weight": transposed("output.weight"),
        },
    )
)
