"""Helium (Kyutai, 2025): Llama with interleaved rotary positions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.ernie import ERNIE
from xformer.families.family import register
from xformer.families.llama import LLAMA
from xformer.families.values import (
    SIZES,
    read_fields,
    read_heads,
    read_rotary_decoder,
    write_rotary_decoder,
)
from xformer.models import LanguageModelConfig

_FIELDS = {
    **SIZES,
    "norm_epsilon": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "feed_forward_bias": "mlp_bias",
}


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of Helium."""
    reader.skip("attention_dropout", "tie_word_embeddings")
    reader.require("hidden_act", "silu", "swish")
    fields = read_fields(
        reader, _FIELDS, max_positions=4096, norm_epsilon=1e-8, attention_bias=False, feed_forward_bias=False
    )
    return LanguageModelConfig(
        **fields,
        **read_heads(reader, fields),
        attention_output_bias=False,
        activation="swiglu",
        norm="rms",
        **read_rotary_decoder(reader, theta=1e5),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of Helium."""
    return {
        **write_rotary_decoder(config, "helium", "HeliumForCausalLM", _FIELDS, gated=True),
        "head_dim": config.features_per_head,
    }


HELIUM = register(
    replace(
        LLAMA,
        model_types=("helium",),
        read_config=read_config,
        write_config=write_config,
        tensors=ERNIE.tensors,
    )
)
