"""Phi 1, 1.5 and 2 (Gunasekar et al., 2023; Li et al., 2023)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import register
from xformer.families.layouts import affine, attention, feed_forward, same, transposed
from xformer.families.llama import LLAMA
from xformer.families.values import (
    SIZES,
    read_activation,
    read_fields,
    read_rotary_decoder,
    write_rotary_decoder,
)
from xformer.models import LanguageModelConfig

_FIELDS = {**SIZES, "norm_epsilon": "layer_norm_eps", "qk_norm": "qk_layernorm"}


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of Phi."""
    reader.skip("attention_dropout", "embd_pdrop", "resid_pdrop", "tie_word_embeddings")
    fields = read_fields(reader, _FIELDS, max_positions=2048, norm_epsilon=1e-5, qk_norm=False)
    return LanguageModelConfig(
        **fields,
        num_key_value_heads=reader.count("num_key_value_heads", default=fields["num_heads"]),
        activation=read_activation(reader, "hidden_act", default="gelu_new"),
        parallel_residual=True,
        shared_norm=True,
        output_bias=True,
        **read_rotary_decoder(reader, fraction=0.5),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of Phi."""
    return write_rotary_decoder(config, "phi", "PhiForCausalLM", _FIELDS, gated=False, writes_fraction=True)


_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."
PHI = register(
    replace(
        LLAMA,
        model_types=("phi",),
        read_config=read_config,
        write_config=write_config,
        tensors={
            "model.embed_tokens.weight": same("embedding.weight"),
            **attention(_LAYER + "self_attn", _OURS + "self_attention", "q_proj k_proj v_proj dense"),
            **affine(_LAYER + "self_attn.q_layernorm", _OURS + "self_attention.query_norm"),
            **affine(_LAYER + "self_attn.k_layernorm", _OURS + "self_attention.key_norm"),
            **affine(_LAYER + "input_layernorm", _OURS + "residual.norm"),
            **feed_forward(_LAYER + "mlp", _OURS + "feed_forward", "fc1 fc2"),
            **affine("model.final_layernorm", "norm"),
            "lm_head.weight": transposed("output.weight"),
            "lm_head.bias": same("output_bias"),
        },
    )
)
