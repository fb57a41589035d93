"""MPNet (Song et al., 2020)."""

from __future__ import annotations

from typing import Any

from xformer.families.bert import FIXED, SIZES_AND_EPSILON, check_pad_id, encoder_tensors, roberta_heads, skip_dropout
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, same
from xformer.families.values import (
    has_tensor,
    read_activation,
    read_fields,
    read_labels,
    read_special_ids,
    write_activation,
    write_fields,
    write_heads,
)
from xformer.models import Encoder, EncoderConfig


def read_config(reader: ConfigReader) -> EncoderConfig:
    """Translate the config.json of MPNet; the names of the tensors determine the heads."""
    skip_dropout(reader)
    reader.require("pad_token_id", 1)
    reader.require("relative_attention_num_buckets", 32)
    fields = read_fields(reader, SIZES_AND_EPSILON, max_positions=512, norm_epsilon=1e-12)
    has_pooler = has_tensor(reader, "pooler.dense.weight") or has_tensor(reader, "classifier.dense.weight")
    return EncoderConfig(
        **FIXED,
        **{**fields, "max_positions": fields["max_positions"] - 2},
        relative_bias=True,
        activation=read_activation(reader, "hidden_act", default="gelu"),
        pooler="tanh" if has_pooler else "none",
        **read_labels(reader),
        masked_lm=has_tensor(reader, "lm_head.dense.weight"),
        **read_special_ids(reader, pad_id=1),
    )


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of MPNet."""
    check_pad_id(config, "mpnet")
    return {
        **write_heads(config, "MPNet", "mpnet"),
        **write_fields(config, SIZES_AND_EPSILON),
        "max_position_embeddings": config.max_positions + 2,
        "relative_attention_num_buckets": 32,
        "hidden_act": write_activation(config),
    }


def _tensors(config: EncoderConfig) -> dict[str, Layout]:
    return {
        **encoder_tensors("mpnet.", "attn.q attn.k attn.v attn.o", "LayerNorm"),
        "mpnet.encoder.relative_attention_bias.weight": same("positions.weight"),
        **roberta_heads("mpnet.", config),
    }


MPNET = register(
    Family(
        model_types=("mpnet",),
        model=Encoder,
        read_config=read_config,
        write_config=write_config,
        prefix="mpnet.",
        tied={
            "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=("*.position_ids",),
        tensors=_tensors,
    )
)
