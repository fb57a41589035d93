"""ELECTRA (Clark et al., 2020), without the replaced-token detection head."""

from __future__ import annotations

from typing import Any

from xformer.families.bert import BERT, BERT_FIELDS, FIXED, encoder_tensors, skip_dropout
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import affine, linear, same
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
    """Translate the config.json of ELECTRA; the names of the tensors determine the heads."""
    reader.require("position_embedding_type", "absolute")
    skip_dropout(reader)
    reader.skip("summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
    fields = read_fields(reader, BERT_FIELDS, max_positions=512, norm_epsilon=1e-12, num_token_types=2)
    embedding_dim = reader.count("embedding_size", default=128)
    return EncoderConfig(
        **FIXED,
        **fields,
        embedding_dim=None if embedding_dim == fields["d_model"] else embedding_dim,
        activation=read_activation(reader, "hidden_act", default="gelu"),
        pooler="gelu" if has_tensor(reader, "classifier.dense.weight") else "none",
        **read_labels(reader),
        masked_lm=has_tensor(reader, "generator_predictions.dense.weight"),
        **read_special_ids(reader, pad_id=0),
    )


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of ELECTRA."""
    return {
        **write_heads(config, "Electra", "electra"),
        **write_fields(config, BERT_FIELDS),
        "embedding_size": config.embedding_dim or config.d_model,
        "hidden_act": write_activation(config),
    }


ELECTRA = register(
    Family(
        model_types=("electra",),
        model=Encoder,
        read_config=read_config,
        write_config=write_config,
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
