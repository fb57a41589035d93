"""ALBERT (Lan et al., 2020), without the sentence-order prediction head."""

from __future__ import annotations

from typing import Any

from xformer.families.bert import BERT, BERT_DEFAULTS, BERT_FIELDS, read_encoder, write_encoder
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import affine, attention, feed_forward, linear, same
from xformer.models import Encoder, EncoderConfig


def _read_config(reader: ConfigReader) -> EncoderConfig:
    reader.require("position_embedding_type", "absolute")
    reader.require("num_hidden_groups", 1)
    reader.require("inner_group_num", 1)
    reader.skip("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
    fields = read_encoder(
        reader,
        BERT_FIELDS,
        pooler=("tanh", "pooler.weight"),
        masked_lm="predictions.dense.weight",
        activation=("hidden_act", "gelu_new"),
        max_positions=512,
        **BERT_DEFAULTS,
    )
    embedding_dim = reader.count("embedding_size", default=128)
    return EncoderConfig(
        **fields, embedding_dim=embedding_dim, share_layers=True, masked_lm_activation=fields["activation"]
    )


def _write_config(config: EncoderConfig) -> dict[str, Any]:
    return {**write_encoder(config, "Albert", "albert", BERT_FIELDS), "embedding_size": config.embedding_dim}


_LAYER, _OURS = "albert.encoder.albert_layer_groups.0.albert_layers.0.", "layers.0."
ALBERT = register(
    Family(
        model_types=("albert",),
        model=Encoder,
        read_config=_read_config,
        write_config=_write_config,
        prefix="albert.",
        tied={
            "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
            "predictions.decoder.bias": "predictions.bias",
        },
        ignored=("*.position_ids", "sop_classifier.*"),
        renamed=BERT.renamed,
        tensors={
            "albert.embeddings.word_embeddings.weight": same("embedding.weight"),
            "albert.embeddings.token_type_embeddings.weight": same("token_types.weight"),
            "albert.embeddings.position_embeddings.weight": same("input.positions.weight"),
            **affine("albert.embeddings.LayerNorm", "input.norm"),
            **linear("albert.encoder.embedding_hidden_mapping_in", "input.projection"),
            **attention(_LAYER + "attention", _OURS + "self_attention", "query key value dense"),
            **affine(_LAYER + "attention.LayerNorm", _OURS + "self_attention_residual.norm"),
            **feed_forward(_LAYER[:-1], _OURS + "feed_forward", "ffn ffn_output"),
            **affine(_LAYER + "full_layer_layer_norm", _OURS + "feed_forward_residual.norm"),
            **linear("albert.pooler", "pooler.linear"),
            **linear("predictions.dense", "masked_lm.linear"),
            **affine("predictions.LayerNorm", "masked_lm.norm"),
            "predictions.bias": same("masked_lm.bias"),
            **linear("classifier", "classifier"),
        },
    )
)
