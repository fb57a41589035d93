"""AFM (Arcee, 2025): Llama with the squared ReLU in place of a gated activation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import register
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
    "norm_epsilon": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "feed_forward_bias": "mlp_bias",
}


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of AFM."""
    reader.skip("attention_dropout", "tie_word_embeddings")
    fields = read_fields(
        reader, _FIELDS, max_positions=4096, norm_epsilon=1e-5, attention_bias=False, feed_forward_bias=False
    )
    return LanguageModelConfig(
        **fields,
        **read_heads(reader, fields),
        activation=read_activation(reader, "hidden_act", default="relu2"),
        norm="rms",
        **read_rotary_decoder(reader),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of AFM."""
    return {
        **write_rotary_decoder(config, "arcee", "ArceeForCausalLM", _FIELDS, gated=False),
        "head_dim": config.features_per_head,
    }


ARCEE = register(replace(LLAMA, model_types=("arcee",), read_config=read_config, write_config=write_config))
