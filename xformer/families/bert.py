"""BERT, RoBERTa and XLM-RoBERTa, and DistilBERT, with their heads.

Devlin et al. (2019); Liu et al. (2019); Conneau et al. (2020); Sanh et al. (2019).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, affine, attention, linear, same, skip_rows
from xformer.families.values import (
    SIZES,
    has_tensor,
    read_activation,
    read_fields,
    read_labels,
    read_special_ids,
    write_activation,
    write_fields,
    write_labels,
)
from xformer.models import Encoder, EncoderConfig

_FIELDS = {**SIZES, "norm_epsilon": "layer_norm_eps", "num_token_types": "type_vocab_size"}
_DISTIL_FIELDS = {
    **SIZES,
    "num_layers": "n_layers num_hidden_layers",
    "d_model": "dim hidden_size",
    "num_heads": "n_heads num_attention_heads",
    "d_ff": "hidden_dim",
}
# Fields that are the same in all types
_FIXED: dict[str, Any] = {
    "norm_position": "post",
    "embedding_norm": True,
    "positions": "learned",
    "scale_embeddings": False,
    "dropout": 0.0,
}
_ROBERTA_TYPES = ("roberta", "xlm-roberta")


def read_config(reader: ConfigReader) -> EncoderConfig:
    """Translate the config.json of BERT or RoBERTa; the names of the tensors determine the heads."""
    reader.require("position_embedding_type", "absolute")
    reader.skip("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "tie_word_embeddings")
    reader.skip("output_hidden_size", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    reader.skip("pooler_size_per_head", "pooler_type", "directionality")
    is_roberta = reader.model_type in _ROBERTA_TYPES
    activation = read_activation(reader, "hidden_act", default="gelu")
    fields = read_fields(reader, _FIELDS, norm_epsilon=1e-12, num_token_types=2)
    if is_roberta:
        fields["max_positions"] -= 2
    has_pooler = has_tensor(reader, "pooler.dense.weight") or has_tensor(reader, "classifier.dense.weight")
    has_masked_lm = has_tensor(reader, "transform.dense.weight") or has_tensor(reader, "lm_head.dense.weight")
    return EncoderConfig(
        **_FIXED,
        **fields,
        activation=activation,
        pooler="tanh" if has_pooler else "none",
        **read_labels(reader),
        masked_lm=has_masked_lm,
        masked_lm_activation="gelu" if is_roberta else activation,
        **read_special_ids(reader),
    )


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of BERT."""
    if config.num_labels and config.masked_lm:
        raise ConfigError("masked_lm is true and num_labels is not 0; bert expects one head")
    if config.pooler == "relu" or (config.num_labels and config.pooler == "none"):
        raise ConfigError(f"pooler is {config.pooler!r}; bert expects 'tanh'")
    if not config.num_token_types:
        raise ConfigError("num_token_types is 0; bert expects at least 1")
    if config.num_labels:
        architecture = "BertForSequenceClassification"
    else:
        architecture = "BertForMaskedLM" if config.masked_lm else "BertModel"
    return {
        "architectures": [architecture],
        "model_type": "bert",
        **write_fields(config, _FIELDS),
        "hidden_act": write_activation(config),
        "pad_token_id": config.pad_id,
        **write_labels(config),
    }


_LAYER, _OURS = "encoder.layer.{i}.", "layers.{i}."
_SHARED_TENSORS = {
    "embeddings.word_embeddings.weight": same("embedding.weight"),
    "embeddings.token_type_embeddings.weight": same("token_types.weight"),
    **affine("embeddings.LayerNorm", "input.norm"),
    **attention(_LAYER + "attention", _OURS + "self_attention", "self.query self.key self.value output.dense"),
    **affine(_LAYER + "attention.output.LayerNorm", _OURS + "self_attention_residual.norm"),
    **linear(_LAYER + "intermediate.dense", _OURS + "feed_forward.up"),
    **linear(_LAYER + "output.dense", _OURS + "feed_forward.down"),
    **affine(_LAYER + "output.LayerNorm", _OURS + "feed_forward_residual.norm"),
}

BERT = register(
    Family(
        model_types=("bert",),
        model=Encoder,
        read_config=read_config,
        write_config=write_config,
        prefix="bert.",
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
        ignored=("*.position_ids", "cls.seq_relationship.*"),
        renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
        tensors={
            **{f"bert.{name}": layout for name, layout in _SHARED_TENSORS.items()},
            "bert.embeddings.position_embeddings.weight": same("input.positions.weight"),
            **linear("bert.pooler.dense", "pooler.linear"),
            **linear("cls.predictions.transform.dense", "masked_lm.linear"),
            **affine("cls.predictions.transform.LayerNorm", "masked_lm.norm"),
            "cls.predictions.bias": same("masked_lm.bias"),
            **linear("classifier", "classifier"),
        },
    )
)


def _roberta_tensors(config: EncoderConfig) -> dict[str, Layout]:
    # With a classifier, its first layer takes the role of the pooler.
    pooler = "classifier.dense" if config.num_labels else "roberta.pooler.dense"
    return {
        **{f"roberta.{name}": layout for name, layout in _SHARED_TENSORS.items()},
        "roberta.embeddings.position_embeddings.weight": skip_rows(2, "input.positions.weight"),
        **linear(pooler, "pooler.linear"),
        **linear("lm_head.dense", "masked_lm.linear"),
        **affine("lm_head.layer_norm", "masked_lm.norm"),
        "lm_head.bias": same("masked_lm.bias"),
        **linear("classifier.out_proj", "classifier"),
    }


ROBERTA = register(
    Family(
        model_types=_ROBERTA_TYPES,
        model=Encoder,
        read_config=read_config,
        prefix="roberta.",
        tied={
            "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
            "lm_head.decoder.bias": "lm_head.bias",
        },
        ignored=("*.position_ids",),
        renamed=BERT.renamed,
        tensors=_roberta_tensors,
    )
)


def read_distilbert_config(reader: ConfigReader) -> EncoderConfig:
    """Translate the config.json of DistilBERT; the names of the tensors determine the heads."""
    reader.skip("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout", "tie_word_embeddings")
    reader.skip("sinusoidal_pos_embds")  # the file contains the positions either way
    activation = read_activation(reader, "activation", default="gelu")
    return EncoderConfig(
        **_FIXED,
        **read_fields(reader, _DISTIL_FIELDS),
        activation=activation,
        norm_epsilon=1e-12,
        pooler="relu" if has_tensor(reader, "pre_classifier.weight") else "none",
        **read_labels(reader),
        masked_lm=has_tensor(reader, "vocab_transform.weight"),
        masked_lm_activation=activation,
        **read_special_ids(reader),
    )


_DISTIL_LAYER = "distilbert.transformer.layer.{i}."
DISTILBERT = register(
    Family(
        model_types=("distilbert",),
        model=Encoder,
        read_config=read_distilbert_config,
        prefix="distilbert.",
        tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ignored=("*.position_ids",),
        tensors={
            "distilbert.embeddings.word_embeddings.weight": same("embedding.weight"),
            "distilbert.embeddings.position_embeddings.weight": same("input.positions.weight"),
            **affine("distilbert.embeddings.LayerNorm", "input.norm"),
            **attention(_DISTIL_LAYER + "attention", _OURS + "self_attention", "q_lin k_lin v_lin out_lin"),
            **affine(_DISTIL_LAYER + "sa_layer_norm", _OURS + "self_attention_residual.norm"),
            **linear(_DISTIL_LAYER + "ffn.lin1", _OURS + "feed_forward.up"),
            **linear(_DISTIL_LAYER + "ffn.lin2", _OURS + "feed_forward.down"),
            **affine(_DISTIL_LAYER + "output_layer_norm", _OURS + "feed_forward_residual.norm"),
            **linear("vocab_transform", "masked_lm.linear"),
            **affine("vocab_layer_norm", "masked_lm.norm"),
            "vocab_projector.bias": same("masked_lm.bias"),
            **linear("pre_classifier", "pooler.linear"),
            **linear("classifier", "classifier"),
        },
    )
)
