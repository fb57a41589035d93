"""StableLM (Bellagente et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import register
from xformer.families.layouts import Layout, affine, attention, feed_forward, same, transposed
from xformer.families.llama import LLAMA
from xformer.families.values import (
    SIZES,
    read_fields,
    read_rotary_decoder,
    write_rotary_decoder,
)
from xformer.models import LanguageModelConfig

_FIELDS = {
    **SIZES,
    "num_key_value_heads": "num_key_value_heads",
    "norm_epsilon": "layer_norm_eps",
    "attention_bias": "use_qkv_bias",
}


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of StableLM."""
    reader.skip("attention_dropout", "hidden_dropout", "tie_word_embeddings")
    reader.require("hidden_act", "silu", "swish")
    reader.require("qk_layernorm", False)
    is_parallel = reader.flag("use_parallel_residual", default=False)
    return LanguageModelConfig(
        parallel_residual=is_parallel,
        shared_norm=is_parallel,
        **read_fields(
            reader, _FIELDS, max_positions=4096, num_key_value_heads=32, norm_epsilon=1e-5, attention_bias=False
        ),
        attention_output_bias=False,
        feed_forward_bias=False,
        activation="swiglu",
        **read_rotary_decoder(reader, fraction=0.25),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of StableLM."""
    return {
        **write_rotary_decoder(config, "stablelm", "StableLmForCausalLM", _FIELDS, gated=True, writes_fraction=True),
        "use_parallel_residual": config.shared_norm,
    }


_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    residual = "residual" if config.shared_norm else "self_attention_residual"
    return {
        "model.embed_tokens.weight": same("embedding.weight"),
        **attention(_LAYER + "self_attn", _OURS + "self_attention", "q_proj k_proj v_proj o_proj"),
        **affine(_LAYER + "input_layernorm", f"{_OURS}{residual}.norm"),
        **affine(_LAYER + "post_attention_layernorm", _OURS + "feed_forward_residual.norm"),
        **feed_forward(_LAYER + "mlp", _OURS + "feed_forward"),
        **affine("model.norm", "norm"),
        "lm_head.weight": transposed("output.weight"),
    }


STABLELM = register(
    replace(
        LLAMA,
        model_types=("stablelm",),
        read_config=read_config,
        write_config=write_config,
        tensors=_tensors,
    )
)
