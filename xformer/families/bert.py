"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT, with their heads.

Devlin et al. (2019); Liu et al. (2019); Conneau et al. (2020); Martin et al. (2020); Sanh et al. (2019).
"""

from __future__ import annotations

import functools
from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, affine, attention, feed_forward, linear, same, skip_rows
from xformer.families.values import (
    SIZES,
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

SIZES_AND_EPSILON = {**SIZES, "norm_epsilon": "layer_norm_eps"}
BERT_FIELDS = {**SIZES_AND_EPSILON, "num_token_types": "type_vocab_size"}
_DISTIL_FIELDS = {
    **SIZES,
    "num_layers": "n_layers num_hidden_layers",
    "d_model": "dim hidden_size",
    "num_heads": "n_heads num_attention_heads",
    "d_ff": "hidden_dim",
}
# Fields that are the same in all types
FIXED: dict[str, Any] = {
    "norm_position": "post",
    "embedding_norm": True,
    "positions": "learned",
    "scale_embeddings": False,
    "dropout": 0.0,
}


def read_config(reader: ConfigReader) -> EncoderConfig:
    """Translate the config.json of BERT or RoBERTa; the names of the tensors determine the heads."""
    reader.require("position_embedding_type", "absolute")
    skip_dropout(reader)
    reader.skip("output_hidden_size", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    reader.skip("pooler_size_per_head", "pooler_type", "directionality")
    is_roberta = reader.model_type != "bert"
    activation = read_activation(reader, "hidden_act", default="gelu")
    fields = read_fields(reader, BERT_FIELDS, norm_epsilon=1e-12, num_token_types=2)
    if is_roberta:
        reader.require("pad_token_id", 1)
        fields["max_positions"] -= 2
    has_pooler = has_tensor(reader, "pooler.dense.weight") or has_tensor(reader, "classifier.dense.weight")
    has_masked_lm = has_tensor(reader, "transform.dense.weight") or has_tensor(reader, "lm_head.dense.weight")
    return EncoderConfig(
        **FIXED,
        **fields,
        activation=activation,
        pooler="tanh" if has_pooler else "none",
        **read_labels(reader),
        masked_lm=has_masked_lm,
        masked_lm_activation="gelu" if is_roberta else activation,
        **read_special_ids(reader, pad_id=1 if is_roberta else 0),
    )


def skip_dropout(reader: ConfigReader) -> None:
    """Accept the keys of dropout, and one that the tensors determine."""
    reader.skip("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "tie_word_embeddings")


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of BERT."""
    return {
        **write_heads(config, "Bert", "bert"),
        **write_fields(config, BERT_FIELDS),
        "hidden_act": write_activation(config),
    }


_OURS = "layers.{i}."


def encoder_tensors(
    prefix: str, names: str = "self.query self.key self.value output.dense", norm: str = "output.LayerNorm"
) -> dict[str, Layout]:
    """Return the table of embeddings and layers.

    Args:
        prefix: Prefix of the tensors, e.g. "bert.".
        names: Names of the projections of attention, see `attention`.
        norm: Name of the norm after attention.
    """
    layer = f"{prefix}encoder.layer.{{i}}."
    return {
        f"{prefix}embeddings.word_embeddings.weight": same("embedding.weight"),
        f"{prefix}embeddings.token_type_embeddings.weight": same("token_types.weight"),
        **affine(f"{prefix}embeddings.LayerNorm", "input.norm"),
        **attention(layer + "attention", _OURS + "self_attention", names),
        **affine(f"{layer}attention.{norm}", _OURS + "self_attention_residual.norm"),
        **feed_forward(layer[:-1], _OURS + "feed_forward", "intermediate.dense output.dense"),
        **affine(layer + "output.LayerNorm", _OURS + "feed_forward_residual.norm"),
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
            **encoder_tensors("bert."),
            "bert.embeddings.position_embeddings.weight": same("input.positions.weight"),
            **linear("bert.pooler.dense", "pooler.linear"),
            **linear("cls.predictions.transform.dense", "masked_lm.linear"),
            **affine("cls.predictions.transform.LayerNorm", "masked_lm.norm"),
            "cls.predictions.bias": same("masked_lm.bias"),
            **linear("classifier", "classifier"),
        },
    )
)


def roberta_heads(prefix: str, config: EncoderConfig) -> dict[str, Layout]:
    """Return the table of heads and positions of RoBERTa.

    With a classifier, its first layer takes the role of the pooler.
    """
    return {
        f"{prefix}embeddings.position_embeddings.weight": skip_rows(2, "input.positions.weight"),
        **linear("classifier.dense" if config.num_labels else f"{prefix}pooler.dense", "pooler.linear"),
        **linear("lm_head.dense", "masked_lm.linear"),
        **affine("lm_head.layer_norm", "masked_lm.norm"),
        "lm_head.bias": same("masked_lm.bias"),
        **linear("classifier.out_proj", "classifier"),
    }


def write_roberta_config(config: EncoderConfig, *, name: str, model_type: str) -> dict[str, Any]:
    """Translate a configuration into the config.json of RoBERTa, XLM-RoBERTa or CamemBERT."""
    check_pad_id(config, model_type)
    return {
        **write_heads(config, name, model_type),
        **write_fields(config, BERT_FIELDS),
        "max_position_embeddings": config.max_positions + 2,
        "hidden_act": write_activation(config),
    }


def check_pad_id(config: EncoderConfig, model_type: str) -> None:
    """Raise ConfigError unless padding is 1, after which transformers counts positions."""
    if config.pad_id != 1:
        raise ConfigError(f"pad_id is {config.pad_id}; {model_type} expects 1")


def _register_roberta(name: str, model_type: str) -> Family:
    return register(
        Family(
            model_types=(model_type,),
            model=Encoder,
            read_config=read_config,
            write_config=functools.partial(write_roberta_config, name=name, model_type=model_type),
            prefix="roberta.",
            tied={
                "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
                "lm_head.decoder.bias": "lm_head.bias",
            },
            ignored=("*.position_ids",),
            renamed=BERT.renamed,
            tensors=lambda config: {**encoder_tensors("roberta."), **roberta_heads("roberta.", config)},
        )
    )


ROBERTA = _register_roberta("Roberta", "roberta")
XLM_ROBERTA = _register_roberta("XLMRoberta", "xlm-roberta")
CAMEMBERT = _register_roberta("Camembert", "camembert")


def read_distilbert_config(reader: ConfigReader) -> EncoderConfig:
    """Translate the config.json of DistilBERT; the names of the tensors determine the heads."""
    reader.skip("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout", "tie_word_embeddings")
    reader.skip("sinusoidal_pos_embds")  # the file contains the positions either way
    activation = read_activation(reader, "activation", default="gelu")
    return EncoderConfig(
        **FIXED,
        **read_fields(reader, _DISTIL_FIELDS),
        activation=activation,
        norm_epsilon=1e-12,
        pooler="relu" if has_tensor(reader, "pre_classifier.weight") else "none",
        **read_labels(reader),
        masked_lm=has_tensor(reader, "vocab_transform.weight"),
        masked_lm_activation=activation,
        **read_special_ids(reader, pad_id=0),
    )


def write_distilbert_config(config: EncoderConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of DistilBERT."""
    return {
        **write_heads(config, "DistilBert", "distilbert"),
        **write_fields(config, _DISTIL_FIELDS),
        "activation": write_activation(config),
    }


_DISTIL_LAYER = "distilbert.transformer.layer.{i}."
DISTILBERT = register(
    Family(
        model_types=("distilbert",),
        model=Encoder,
        read_config=read_distilbert_config,
        write_config=write_distilbert_config,
        prefix="distilbert.",
        tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
        ignored=("*.position_ids",),
        tensors={
            "distilbert.embeddings.word_embeddings.weight": same("embedding.weight"),
            "distilbert.embeddings.position_embeddings.weight": same("input.positions.weight"),
            **affine("distilbert.embeddings.LayerNorm", "input.norm"),
            **attention(_DISTIL_LAYER + "attention", _OURS + "self_attention", "q_lin k_lin v_lin out_lin"),
            **affine(_DISTIL_LAYER + "sa_layer_norm", _OURS + "self_attention_residual.norm"),
            **feed_forward(_DISTIL_LAYER + "ffn", _OURS + "feed_forward", "lin1 lin2"),
            **affine(_DISTIL_LAYER + "output_layer_norm", _OURS + "feed_forward_residual.norm"),
            **linear("vocab_transform", "masked_lm.linear"),
            **affine("vocab_layer_norm", "masked_lm.norm"),
            "vocab_projector.bias": same("masked_lm.bias"),
            **linear("pre_classifier", "pooler.linear"),
            **linear("classifier", "classifier"),
        },
    )
)
