"""MPNet (Song et al., 2020)."""

from __future__ import annotations

from typing import Any

from xformer.families.bert import SIZES_AND_EPSILON, encoder_tensors, read_roberta, roberta_heads, write_roberta
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, same
from xformer.models import Encoder, EncoderConfig


def _read_config(reader: ConfigReader) -> EncoderConfig:
    reader.require("relative_attention_num_buckets", 32)
    fields = read_roberta(reader, SIZES_AND_EPSILON, max_positions=512, norm_epsilon=1e-12)
    return EncoderConfig(**fields, relative_bias=True)


def _write_config(config: EncoderConfig) -> dict[str, Any]:
    return {**write_roberta(config, "MPNet", "mpnet", SIZES_AND_EPSILON), "relative_attention_num_buckets": 32}


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
        read_config=_read_config,
        write_config=_write_config,
        prefix="mpnet.",
        tied={
            "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=("*.position_ids",),
        tensors=_tensors,
    )
)
