"""ELECTRA (Clark et al., 2020), without the replaced-token detection head."""

from __future__ import annotations

from typing import Any

from xformer.families.bert import BERT, BERT_DEFAULTS, BERT_FIELDS, encoder_tensors, read_encoder, write_encoder
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import affine, linear, same
from xformer.models import Encoder, EncoderConfig


def _read_config(reader: ConfigReader) -> EncoderConfig:
    reader.require("position_embedding_type", "absolute")
    reader.skip("summary_type", "summary_use_proj", "summary_activation")
    fields = read_encoder(
        reader,
        BERT_FIELDS,
        pooler=("gelu", "classifier.dense.weight"),
        masked_lm="generator_predictions.dense.weight",
        max_positions=512,
        **BERT_DEFAULTS,
    )
    embedding_dim = reader.count("embedding_size", default=128)
    return EncoderConfig(**fields, embedding_dim=None if embedding_dim == fields["d_model"] else embedding_dim)


def _write_config(config: EncoderConfig) -> dict[str, Any]:
    embedding_dim = config.embedding_dim or config.d_model
    return {**write_encoder(config, "Electra", "electra", BERT_FIELDS), "embedding_size": embedding_dim}


ELECTRA = register(
    Family(
        model_types=("electra",),
        model=Encoder,
        read_config=_read_config,
        write_config=_write_config,
        prefix="electra.",
        tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
        ignored=("*.position_ids", "discriminator_predictions.*"),
        renamed=BERT.renamed,
        tensors={
            **encoder_tensors("electra."),
            "electra.embeddings.position_embeddings.weight": same("input.positions.weight"),
            **linear("electra.embeddings_project", "input.projection"),
            **linear("generator_predictions.dense", "masked_lm.linear"),
            **affine("generator_predictions.LayerNorm", "masked_lm.norm"),
            "generator_lm_head.bias": same("masked_lm.bias"),
            **linear("classifier.dense", "pooler.linear"),
            **linear("classifier.out_proj", "classifier"),
        },
    )
)
