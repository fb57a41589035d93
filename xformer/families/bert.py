"""BERT, RoBERTa and XLM-RoBERTa, and DistilBERT, with their heads.

Devlin et al. (2019); Liu et al. (2019); Conneau et al. (2020); Sanh et al. (2019).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, linear, rows_from, same, unchanged
from xformer.families.values import (
    activation_of,
    has_tensor,
    labels_of,
    name_of_activation,
    special_ids,
    write_labels,
)
from xformer.models import Encoder, EncoderConfig

_ROBERTA = ("roberta", "xlm-roberta")


def read_config(reader: ConfigReader) -> EncoderConfig:
    """Translate the config.json of BERT or RoBERTa; the tensors say which heads there are."""
    reader.require("position_embedding_type", "absolute")
    reader.skip("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "tie_word_embeddings")
    reader.skip("output_hidden_size", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers")
    reader.skip("pooler_size_per_head", "pooler_type", "directionality")
    is_roberta = reader.model_type in _ROBERTA
    max_positions, activation = (
        reader.count("max_position_embeddings"),
        activation_of(reader, "hidden_act", default="gelu"),
    )
    has_pooler = has_tensor(reader, "pooler.dense.weight") or has_tensor(reader, "classifier.dense.weight")
    return EncoderConfig(
        vocab_size=reader.count("vocab_size"),
        num_layers=reader.count("num_hidden_layers"),
        d_model=reader.count("hidden_size"),
        num_heads=reader.count("num_attention_heads"),
        d_ff=reader.count("intermediate_size"),
        activation=activation,
        norm_position="post",
        norm_epsilon=reader.number("layer_norm_eps", default=1e-12),
        embedding_norm=True,
        positions="learned",
        max_positions=max_positions - 2 if is_roberta else max_positions,
        num_token_types=reader.count("type_vocab_size", default=2),
        scale_embeddings=False,
        dropout=0.0,
        pooler="tanh" if has_pooler else "none",
        **labels_of(reader),
        masked_lm=has_tensor(reader, "predictions.transform.dense.weight")
        or has_tensor(reader, "lm_head.dense.weight"),
        masked_lm_activation="gelu" if is_roberta else activation,
        **special_ids(reader),
    )


def write_config(config: EncoderConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of BERT."""
    if config.num_labels and config.masked_lm:
        raise ConfigError("masked_lm is true and num_labels is not 0; bert expects one head")
    architecture = "BertForMaskedLM" if config.masked_lm else "BertModel"
    if config.pooler == "relu" or (config.num_labels and config.pooler != "tanh") or not config.num_token_types:
        raise ConfigError(
            f"pooler is {config.pooler!r} and num_token_types {config.num_token_types}; "
            "bert expects 'tanh' and at least 1"
        )
    return {
        "architectures": ["BertForSequenceClassification" if config.num_labels else architecture],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.d_ff,
        "hidden_act": name_of_activation(config),
        "layer_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_positions,
        "type_vocab_size": config.num_token_types,
        "pad_token_id": config.pad_id,
        **write_labels(config),
    }


_LAYER, _OURS = "encoder.layer.{i}.", "layers.{i}."
_STACK = {
    "embeddings.word_embeddings.weight": same("embedding.weight"),
    "embeddings.token_type_embeddings.weight": same("token_types.weight"),
    **unchanged("embeddings.LayerNorm", "input.norm"),
    **linear(_LAYER + "attention.self.query", _OURS + "self_attention.query"),
    **linear(_LAYER + "attention.self.key", _OURS + "self_attention.key"),
    **linear(_LAYER + "attention.self.value", _OURS + "self_attention.value"),
    **linear(_LAYER + "attention.output.dense", _OURS + "self_attention.output"),
    **unchanged(_LAYER + "attention.output.LayerNorm", _OURS + "self_attention_residual.norm"),
    **linear(_LAYER + "intermediate.dense", _OURS + "feed_forward.up"),
    **linear(_LAYER + "output.dense", _OURS + "feed_forward.down"),
    **unchanged(_LAYER + "output.LayerNorm", _OURS + "feed_forward_residual.norm"),
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
            **{f"bert.{name}": layout for name, layout in _STACK.items()},
            "bert.embeddings.position_embeddings.weight": same("input.positions.weight"),
            **linear("bert.pooler.dense", "pooler.linear"),
            **linear("cls.predictions.transform.dense", "masked_lm.linear"),
            **unchanged("cls.predictions.transform.LayerNorm", "masked_lm.norm"),
            "cls.predictions.bias": same("masked_lm.bias"),
            **linear("classifier", "classifier"),
        },
    )
)


def _roberta_tensors(config: EncoderConfig) -> dict[str, Layout]:
    # The classifier has a layer of its own in place of the pooler.
    pooler = "classifier.dense" if config.num_labels else "roberta.pooler.dense"
    return {
        **{f"roberta.{name}": layout for name, layout in _STACK.items()},
        "roberta.embeddings.position_embeddings.weight": rows_from(2, "input.positions.weight"),
        **linear(pooler, "pooler.linear"),
        **linear("lm_head.dense", "masked_lm.linear"),
        **unchanged("lm_head.layer_norm", "masked_lm.norm"),
        "lm_head.bias": same("masked_lm.bias"),
        **linear("classifier.out_proj", "classifier"),
    }


ROBERTA = register(
    Family(
        model_types=_ROBERTA,
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
    """Translate the config.json of DistilBERT; the tensors say which heads there are."""
    reader.skip("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout", "tie_word_embeddings")
    reader.skip("sinusoidal_pos_embds")  # they are stored, and not trained
    activation = activation_of(reader, "activation", default="gelu")
    return EncoderConfig(
        vocab_size=reader.count("vocab_size"),
        num_layers=reader.count("n_layers", "num_hidden_layers"),
        d_model=reader.count("dim", "hidden_size"),
        num_heads=reader.count("n_heads", "num_attention_heads"),
        d_ff=reader.count("hidden_dim"),
        activation=activation,
        norm_position="post",
        norm_epsilon=1e-12,
        embedding_norm=True,
        positions="learned",
        max_positions=reader.count("max_position_embeddings"),
        scale_embeddings=False,
        dropout=0.0,
        pooler="relu" if has_tensor(reader, "pre_classifier.weight") else "none",
        **labels_of(reader),
        masked_lm=has_tensor(reader, "vocab_transform.weight"),
        masked_lm_activation=activation,
        **special_ids(reader),
    )


_DISTIL = "distilbert.transformer.layer.{i}."
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
            **unchanged("distilbert.embeddings.LayerNorm", "input.norm"),
            **linear(_DISTIL + "attention.q_lin", _OURS + "self_attention.query"),
            **linear(_DISTIL + "attention.k_lin", _OURS + "self_attention.key"),
            **linear(_DISTIL + "attention.v_lin", _OURS + "self_attention.value"),
            **linear(_DISTIL + "attention.out_lin", _OURS + "self_attention.output"),
            **unchanged(_DISTIL + "sa_layer_norm", _OURS + "self_attention_residual.norm"),
            **linear(_DISTIL + "ffn.lin1", _OURS + "feed_forward.up"),
            **linear(_DISTIL + "ffn.lin2", _OURS + "feed_forward.down"),
            **unchanged(_DISTIL + "output_layer_norm", _OURS + "feed_forward_residual.norm"),
            **linear("vocab_transform", "masked_lm.linear"),
            **unchanged("vocab_layer_norm", "masked_lm.norm"),
            "vocab_projector.bias": same("masked_lm.bias"),
            **linear("pre_classifier", "pooler.linear"),
            **linear("classifier", "classifier"),
        },
    )
)
