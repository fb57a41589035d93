"""Helium (Kyutai, 2025): Llama with interleaved rotary positions."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.ernie import ERNIE
from xformer.families.family import Family, register
from xformer.families.llama import LLAMA
from xformer.families.values import (
    SIZES,
    read_fields,
    read_output,
    read_rope,
    write_activation,
    write_fields,
    write_output,
    write_rope,
)
from xformer.models import LanguageModel, LanguageModelConfig

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
        num_key_value_heads=reader.count("num_key_value_heads", default=fields["num_heads"]),
        head_dim=reader.count("head_dim", default=fields["d_model"] // fields["num_heads"]),
        attention_output_bias=False,
        activation="swiglu",
        norm="rms",
        positions="rotary",
        scale_embeddings=False,
        **read_rope(reader, theta=1e5),
        **read_output(reader),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of Helium."""
    return {
        "architectures": ["HeliumForCausalLM"],
        "model_type": "helium",
        **write_fields(config, _FIELDS),
        "num_key_value_heads": config.num_key_value_heads or config.num_heads,
        "head_dim": config.features_per_head,
        "hidden_act": write_activation(config, gated=True),
        **write_rope(config),
        **write_output(config),
    }


HELIUM = register(
    Family(
        model_types=("helium",),
        model=LanguageModel,
        read_config=read_config,
        write_config=write_config,
        prefix=LLAMA.prefix,
        tied=LLAMA.tied,
        ignored=LLAMA.ignored,
        tensors=ERNIE.tensors,
    )
)
