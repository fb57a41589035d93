"""BERT, ELECTRA, ALBERT, RoBERTa, XLM-RoBERTa, CamemBERT, MPNet and DistilBERT, with their heads.

Without the heads of ELECTRA for replaced tokens and of ALBERT for the order of sentences.

Devlin et al. (2019); Clark et al. (2020); Lan et al. (2020); Liu et al. (2019); Conneau et al. (2020); Martin et al.
(2020); Song et al. (2020); Sanh et al. (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import Layout, affine, attention, feed_forward, linear, same, skip_rows
from xformer.families.values import (
    SIZES,
    has_tensor,
    read_activation,
    read_fields,
    read_labels,
    read_special_ids,
    value_of,
    write_activation,
    write_fields,
    write_labels,
    write_special_ids,
)
from xformer.models import Encoder, EncoderConfig

SIZES_AND_EPSILON = {**SIZES, "norm_epsilon": "layer_norm_eps"}
BERT_FIELDS = {**SIZES_AND_EPSILON, "num_token_types": "type_vocab_size"}
BERT_DEFAULTS: dict[str, Any] = {"norm_epsilon": 1e-12, "num_token_types": 2}
_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
_ABSOLUTE = {"position_embedding_type": "absolute"}
# Fields that are the same in all types
_FIXED: dict[str, Any] = {
    "norm_position": "post",
    "embedding_norm": True,
    "positions": "learned",
    "scale_embeddings": False,
    "dropout": 0.0,
}


def _read_electra(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    size = reader.count("embedding_size", default=128)
    return {"embedding_dim": None if size == fields["d_model"] else size}


def register_encoder(
    name: str,
    model_type: str,
    keys: Mapping[str, str],
    tensors: Mapping[str, Layout] | Callable[[EncoderConfig], Mapping[str, Layout]],
    *,
    pooler: tuple[str, ...],
    masked_lm: tuple[str, ...],
    tied: Mapping[str, str],
    defaults: Mapping[str, Any] = BERT_DEFAULTS,
    activation: tuple[str, str] = ("hidden_act", "gelu"),
    is_gated: bool = False,
    same_activation: bool = False,
    unused_positions: int = 0,
    pad_id: int | None = None,
    default_pad_id: int = 0,
    required: Mapping[str, Any] = _ABSOLUTE,
    skipped: str = "",
    ignored: tuple[str, ...] = (),
    renamed: Mapping[str, str] = _RENAMED,
    read: Callable[[ConfigReader, dict[str, Any]], Mapping[str, Any]] = lambda reader, fields: {},
    write: Callable[[EncoderConfig], Mapping[str, Any]] = lambda config: {},
) -> Family:
    """Register a family of encoders; the names of the tensors determine the heads.

    Args:
        name: Prefix of the names of classes in transformers, e.g. "Bert".
        model_type: Model type.
        keys: As for `read_fields`.
        tensors: As in `Family`.
        pooler: Activation of the pooler, and endings of the names of its tensors.
        masked_lm: Endings of the names of tensors of the head of masked tokens.
        tied: As in `Family`; the name of the embedding begins with the prefix of the tensors.
        defaults: As for `read_fields`.
        activation: Key of the activation, and its default.
        is_gated: Whether the activation is that of a gate.
        same_activation: Whether the head of masked tokens has the activation of the layers.
        unused_positions: First rows of the table of positions that are not used.
        pad_id: The only id of padding; None for any.
        default_pad_id: Id of padding if config.json has none.
        required: {key: its only value, or a function of the fields that returns it}.
        skipped: Keys that may have any value.
        ignored: Further patterns of the names of constant tensors.
        renamed: As in `Family`.
        read: Function (reader, fields) -> further fields.
        write: Function (configuration) -> further keys of config.json.
    """

    def read_config(reader: ConfigReader) -> EncoderConfig:
        reader.skip(*skipped.split())
        reader.require("is_causal", False)
        if pad_id is not None:
            reader.require("pad_token_id", pad_id)
        key, default = activation
        fields = {
            **_FIXED,
            **read_fields(reader, keys, **defaults),
            "activation": read_activation(reader, key, default=default, gated=is_gated),
            "pooler": pooler[0] if has_tensor(reader, pooler[1:]) else "none",
            **read_labels(reader),
            "masked_lm": has_tensor(reader, masked_lm),
            **read_special_ids(reader, pad_id=default_pad_id if pad_id is None else pad_id),
        }
        for key, value in required.items():
            reader.require(key, value_of(value, fields))
        if same_activation:
            fields["masked_lm_activation"] = fields["activation"]
        fields["max_positions"] -= unused_positions
        return EncoderConfig(**{**fields, **read(reader, fields)})

    def write_config(config: EncoderConfig) -> dict[str, Any]:
        if pad_id is not None and config.pad_id != pad_id:  # after which transformers counts positions
            raise ConfigError(f"pad_id is {config.pad_id}; {model_type} expects {pad_id}")
        if config.num_labels and config.masked_lm:
            raise ConfigError(f"masked_lm is true and num_labels {config.num_labels}; {model_type} expects one head")
        if config.num_labels and config.pooler == "none":
            raise ConfigError(f"pooler is 'none' and num_labels {config.num_labels}; {model_type} expects a pooler")
        head = "ForMaskedLM" if config.masked_lm else "ForSequenceClassification" if config.num_labels else "Model"
        return {
            "architectures": [f"{name}{head}"],
            "model_type": model_type,
            **write_special_ids(config),
            **write_labels(config),
            activation[0]: write_activation(config, gated=is_gated),
            **write_fields(config, keys),
            "max_position_embeddings": config.max_positions + unused_positions,
            **write(config),
        }

    prefix = next(iter(tied.values())).split(".")[0]
    return Family(
        model_types=(model_type,),
        model=Encoder,
        read_config=read_config,
        write_config=write_config,
        prefix=f"{prefix}.",
        tied=tied,
        ignored=("*.position_ids", *ignored),
        renamed=renamed,
        tensors=tensors,
    ).register()


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


register_encoder(
    "Bert",
    "bert",
    BERT_FIELDS,
    {
        **encoder_tensors("bert."),
        "bert.embeddings.position_embeddings.weight": same("input.positions.weight"),
        **linear("bert.pooler.dense", "pooler.linear"),
        **linear("cls.predictions.transform.dense", "masked_lm.linear"),
        **affine("cls.predictions.transform.LayerNorm", "masked_lm.norm"),
        "cls.predictions.bias": same("masked_lm.bias"),
        **linear("classifier", "classifier"),
    },
    pooler=("tanh", "pooler.dense.weight"),
    masked_lm=("transform.dense.weight",),
    same_activation=True,
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    skipped="output_hidden_size pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head "
    "pooler_type directionality",
    ignored=("cls.seq_relationship.*",),
)
register_encoder(
    "Electra",
    "electra",
    BERT_FIELDS,
    {
        **encoder_tensors("electra."),
        "electra.embeddings.position_embeddings.weight": same("input.positions.weight"),
        **linear("electra.embeddings_project", "input.projection"),
        **linear("generator_predictions.dense", "masked_lm.linear"),
        **affine("generator_predictions.LayerNorm", "masked_lm.norm"),
        "generator_lm_head.bias": same("masked_lm.bias"),
        **linear("classifier.dense", "pooler.linear"),
        **linear("classifier.out_proj", "classifier"),
    },
    pooler=("gelu", "classifier.dense.weight"),
    masked_lm=("generator_predictions.dense.weight",),
    defaults={**BERT_DEFAULTS, "max_positions": 512},
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    skipped="summary_type summary_use_proj summary_activation",
    ignored=("discriminator_predictions.*",),
    read=_read_electra,
    write=lambda config: {"embedding_size": config.embedding_dim or config.d_model},
)

_ALBERT_LAYER, _OUR_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0.", "layers.0."
register_encoder(
    "Albert",
    "albert",
    BERT_FIELDS,
    {
        "albert.embeddings.word_embeddings.weight": same("embedding.weight"),
        "albert.embeddings.token_type_embeddings.weight": same("token_types.weight"),
        "albert.embeddings.position_embeddings.weight": same("input.positions.weight"),
        **affine("albert.embeddings.LayerNorm", "input.norm"),
        **linear("albert.encoder.embedding_hidden_mapping_in", "input.projection"),
        **attention(_ALBERT_LAYER + "attention", _OUR_LAYER + "self_attention", "query key value dense"),
        **affine(_ALBERT_LAYER + "attention.LayerNorm", _OUR_LAYER + "self_attention_residual.norm"),
        **feed_forward(_ALBERT_LAYER[:-1], _OUR_LAYER + "feed_forward", "ffn ffn_output"),
        **affine(_ALBERT_LAYER + "full_layer_layer_norm", _OUR_LAYER + "feed_forward_residual.norm"),
        **linear("albert.pooler", "pooler.linear"),
        **linear("predictions.dense", "masked_lm.linear"),
        **affine("predictions.LayerNorm", "masked_lm.norm"),
        "predictions.bias": same("masked_lm.bias"),
        **linear("classifier", "classifier"),
    },
    pooler=("tanh", "pooler.weight"),
    masked_lm=("predictions.dense.weight",),
    activation=("hidden_act", "gelu_new"),
    same_activation=True,
    defaults={**BERT_DEFAULTS, "max_positions": 512},
    tied={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    required={**_ABSOLUTE, "num_hidden_groups": 1, "inner_group_num": 1},
    skipped="down_scale_factor gap_size net_structure_type num_memory_blocks",
    ignored=("sop_classifier.*",),
    read=lambda reader, fields: {"embedding_dim": reader.count("embedding_size", default=128), "share_layers": True},
    write=lambda config: {"embedding_size": config.embedding_dim},
)


def _roberta_heads(prefix: str, config: EncoderConfig) -> dict[str, Layout]:
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


def _mpnet_tensors(config: EncoderConfig) -> dict[str, Layout]:
    return {
        **encoder_tensors("mpnet.", "attn.q attn.k attn.v attn.o", "LayerNorm"),
        "mpnet.encoder.relative_attention_bias.weight": same("positions.weight"),
        **_roberta_heads("mpnet.", config),
    }


def _roberta(prefix: str) -> dict[str, Any]:
    """Return arguments of `register_encoder` that RoBERTa and MPNet share."""
    decoder = f"{prefix}.embeddings.word_embeddings.weight"
    return {
        "pooler": ("tanh", "pooler.dense.weight", "classifier.dense.weight"),
        "masked_lm": ("lm_head.dense.weight",),
        "unused_positions": 2,
        "pad_id": 1,
        "tied": {"lm_head.decoder.weight": decoder, "lm_head.decoder.bias": "lm_head.bias"},
    }


for _name, _type in {"Roberta": "roberta", "XLMRoberta": "xlm-roberta", "Camembert": "camembert"}.items():
    register_encoder(
        _name,
        _type,
        BERT_FIELDS,
        lambda config: {**encoder_tensors("roberta."), **_roberta_heads("roberta.", config)},
        **_roberta("roberta"),
    )
register_encoder(
    "MPNet",
    "mpnet",
    SIZES_AND_EPSILON,
    _mpnet_tensors,
    **_roberta("mpnet"),
    defaults={"max_positions": 512, "norm_epsilon": 1e-12},
    required={"relative_attention_num_buckets": 32},
    read=lambda reader, fields: {"relative_bias": True},
    write=lambda config: {"relative_attention_num_buckets": 32},
)

_DISTIL_LAYER = "distilbert.transformer.layer.{i}."
register_encoder(
    "DistilBert",
    "distilbert",
    {
        **SIZES,
        "num_layers": "n_layers num_hidden_layers",
        "d_model": "dim hidden_size",
        "num_heads": "n_heads num_attention_heads",
        "d_ff": "hidden_dim",
    },
    {
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
    pooler=("relu", "pre_classifier.weight"),
    masked_lm=("vocab_transform.weight",),
    activation=("activation", "gelu"),
    same_activation=True,
    defaults={},
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    required={},
    # Of the first versions; and the file contains the positions either way.
    skipped="tie_weights_ sinusoidal_pos_embds",
    read=lambda reader, fields: {"norm_epsilon": 1e-12},
)
