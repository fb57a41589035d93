"""GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, affine, feed_forward, fused_attention, linear, same, transposed
from xformer.families.values import (
    SIZES,
    read_activation,
    read_fields,
    read_output,
    read_rope,
    write_activation,
    write_decoder,
    write_rope,
)
from xformer.models import LanguageModel, LanguageModelConfig

_FIELDS = {
    **SIZES,
    "norm_epsilon": "layer_norm_eps",
    "parallel_residual": "use_parallel_residual",
    "attention_bias": "attention_bias",
}
_LAYER, _OURS = "gpt_neox.layers.{i}.", "layers.{i}."


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    return LanguageModelConfig(
        **read_fields(reader, _FIELDS, norm_epsilon=1e-5, parallel_residual=True, attention_bias=True),
        activation=read_activation(reader, "hidden_act", default="gelu"),
        positions="rotary",
        scale_embeddings=False,
        **read_rope(reader, fraction=0.25),
        **read_output(reader, "embed_out.weight"),
    )


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config, "gpt_neox", "GPTNeoXForCausalLM", _FIELDS),
        "hidden_act": write_activation(config),
        "rope_parameters": write_rope(config, writes_fraction=True)["rope_parameters"],
        "rotary_pct": config.rotary_fraction,
        "rotary_emb_base": config.rope_theta,
    }


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    return {
        "gpt_neox.embed_in.weight": same("embedding.weight"),
        **fused_attention(_LAYER + "attention.query_key_value", _OURS + "self_attention", config.num_heads),
        **linear(_LAYER + "attention.dense", _OURS + "self_attention.output"),
        **feed_forward(_LAYER + "mlp", _OURS + "feed_forward", "dense_h_to_4h dense_4h_to_h"),
        **affine(_LAYER + "input_layernorm", _OURS + "self_attention_residual.norm"),
        **affine(_LAYER + "post_attention_layernorm", _OURS + "feed_forward_residual.norm"),
        **affine("gpt_neox.final_layer_norm", "norm"),
        "embed_out.weight": transposed("output.weight"),
    }


GPT_NEOX = register(
    Family(
        model_types=("gpt_neox",),
        model=LanguageModel,
        read_config=_read_config,
        write_config=_write_config,
        prefix="gpt_neox.",
        tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
        ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
        tensors=_tensors,
    )
)
