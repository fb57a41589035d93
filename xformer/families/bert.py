"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT, with their heads.

Devlin et al. (2019); Liu et al. (2019); Conneau et al. (2020); Martin et al. (2020); Sanh et al. (2019).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
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
BERT_DEFAULTS: dict[str, Any] = {"norm_epsilon": 1e-12, "num_token_types": 2}
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


def read_encoder(
    reader: ConfigReader,
    keys: Mapping[str, str],
    *,
    pooler: tuple[str, ...],
    masked_lm: str,
    activation: tuple[str, str] = ("hidden_act", "gelu"),
    pad_id: int = 0,
    **defaults: Any,
) -> dict[str, Any]:
    """Return the fields that most encoders share; the names of the tensors determine the heads.

    Args:
        reader: The configuration.
        keys: As for `read_fields`.
        pooler: Activation of the pooler, and endings of the names of its tensors.
        masked_lm: Ending of the name of a tensor of the head of masked tokens.
        activation: Key of the activation, and its default.
        pad_id: Id of padding if config.json has none.
        **defaults: As for `read_fields`.
    """
    name, *endings = pooler
    key, default = activation
    return {
        **FIXED,
        **read_fields(reader, keys, **defaults),
        "activation": read_activation(reader, key, default=default),
        "pooler": name if any(has_tensor(reader, ending) for ending in endings) else "none",
        **read_labels(reader),
        "masked_lm": has_tensor(reader, masked_lm),
        **read_special_ids(reader, pad_id=pad_id),
    }


def write_encoder(config: EncoderConfig, name: str, model_type: str, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return the config.json keys that most encoders share; for the arguments, see `write_heads` and `write_fields`."""
    heads, activation = write_heads(config, name, model_type), write_activation(config)
    return {**heads, **write_fields(config, keys), "hidden_act": activation}


def _read_config(reader: ConfigReader) -> EncoderConfig:
    reader.require("position_embedding_type", "absolute")
    reader.skip("output_hidden_size", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    reader.skip("pooler_size_per_head", "pooler_type", "directionality")
    pooler, masked_lm = ("tanh", "pooler.dense.weight"), "transform.dense.weight"
    fields = read_encoder(reader, BERT_FIELDS, pooler=pooler, masked_lm=masked_lm, **BERT_DEFAULTS)
    return EncoderConfig(**fields, masked_lm_activation=fields["activation"])


def _write_config(config: EncoderConfig) -> dict[str, Any]:
    return write_encoder(config, "Bert", "bert", BERT_FIELDS)


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
        read_config=_read_config,
        write_config=_write_config,
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


def read_roberta(reader: ConfigReader, keys: Mapping[str, str] = BERT_FIELDS, **defaults: Any) -> dict[str, Any]:
    """Return the fields of RoBERTa; arguments are those of `read_fields`."""
    reader.require("pad_token_id", 1)
    pooler = ("tanh", "pooler.dense.weight", "classifier.dense.weight")
    fields = read_encoder(reader, keys, pooler=pooler, masked_lm="lm_head.dense.weight", pad_id=1, **defaults)
    return {**fields, "max_positions": fields["max_positions"] - 2}


def write_roberta(
    config: EncoderConfig, name: str, model_type: str, keys: Mapping[str, str] = BERT_FIELDS
) -> dict[str, Any]:
    """Return the config.json keys of RoBERTa; arguments are those of `write_encoder`.

    Raises:
        ConfigError: Unless padding is 1, after which transformers counts positions.
    """
    if config.pad_id != 1:
        raise ConfigError(f"pad_id is {config.pad_id}; {model_type} expects 1")
    return {**write_encoder(config, name, model_type, keys), "max_position_embeddings": config.max_positions + 2}


def _read_roberta_config(reader: ConfigReader) -> EncoderConfig:
    reader.require("position_embedding_type", "absolute")
    return EncoderConfig(**read_roberta(reader, **BERT_DEFAULTS))


def _register_roberta(name: str, model_type: str) -> Family:
    return register(
        Family(
            model_types=(model_type,),
            model=Encoder,
            read_config=_read_roberta_config,
            write_config=functools.partial(write_roberta, name=name, model_type=model_type),
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
    reader.skip("tie_weights_")  # of the first versions
    reader.skip("sinusoidal_pos_embds")  # the file contains the positions either way
    fields = read_encoder(
        reader,
        _DISTIL_FIELDS,
        pooler=("relu", "pre_classifier.weight"),
        masked_lm="vocab_transform.weight",
        activation=("activation", "gelu"),
    )
    return EncoderConfig(**fields, norm_epsilon=1e-12, masked_lm_activation=fields["activation"])


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
