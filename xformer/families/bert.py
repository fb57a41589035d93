"""BERT, ELECTRA, ALBERT, RoBERTa, XLM-RoBERTa, CamemBERT, MPNet and DistilBERT, with their heads.

Without the heads of ELECTRA for replaced tokens and of ALBERT for the order of sentences.

Devlin et al. (2019); Clark et al. (2020); Lan et al. (2020); Liu et al. (2019); Conneau et al. (2020); Martin et al.
(2020); Song et al. (2020); Sanh et al. (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from xformer.errors import ConfigError
from xformer.families.family import REQUIRED, Column, ConfigReader, Key, Table, Tensors
from xformer.families.layouts import affine, attention, feed_forward, linear, same, skip_rows
from xformer.families.values import LABELS, activation, has_tensor, named, read_special_ids, sizes, write_special_ids
from xformer.models import Encoder, EncoderConfig
from xformer.models.base import BaseModel

_TYPES = {"num_token_types": Key("type_vocab_size", 2)}
_RENAMED = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Fields that are the same in most types
_FIXED: dict[str, Any] = {
    "norm_position": "post",
    "embedding_norm": True,
    "positions": "learned",
    "scale_embeddings": False,
    "dropout": 0.0,
}
_GELU = activation("hidden_act", "gelu")
# The head of masked tokens has the activation of the layers.
SAME_ACTIVATION = {"masked_lm_activation": lambda fields: fields["activation"]}


@dataclass(frozen=True, kw_only=True)
class EncoderTable(Table):
    """The config.json of one type of encoder; the names of the tensors determine the heads.

    Attributes:
        architecture: Prefix of the names of classes in transformers, e.g. "Bert".
        activation: Column of the activation.
        pooler: Activation of the pooler, and endings of the names of its tensors.
        masked_lm: Endings of the names of tensors of the head of masked tokens.
        pad_id: The only id of padding; None for any.
        default_pad_id: Id of padding if config.json has none.
        ignored: As in `Family`, besides position_ids.
    """

    model: type[BaseModel] = Encoder
    required: dict[str, Any] = field(default_factory=lambda: {"position_embedding_type": "absolute"})
    activation: Column = _GELU
    pooler: tuple[str, ...]
    masked_lm: tuple[str, ...]
    pad_id: int | None = None
    default_pad_id: int = 0
    renamed: Mapping[str, str] = field(default_factory=lambda: _RENAMED)

    def of_family(self) -> dict[str, Any]:
        """Return the fields that describe the tensors of the family; the name of the embedding has the prefix."""
        prefix = f"{next(iter(self.tied.values())).split('.')[0]}."
        return super().of_family() | {"prefix": prefix, "ignored": ("*.position_ids", *self.ignored)}

    def all_columns(self) -> tuple[Column, ...]:
        """Return the columns with those of the activation, the heads and special tokens."""
        return (self.activation, LABELS, Column(self._read_heads, self._write_heads), *self.columns)

    def _read_heads(self, reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
        reader.require("is_causal", False)
        if self.pad_id is not None:
            reader.require("pad_token_id", self.pad_id)
        return {
            **_FIXED,
            "pooler": self.pooler[0] if reader.classes or has_tensor(reader, self.pooler[1:]) else "none",
            "masked_lm": not reader.classes and has_tensor(reader, self.masked_lm),
            **read_special_ids(reader, pad_id=self.default_pad_id if self.pad_id is None else self.pad_id),
        }

    def _write_heads(self, config: EncoderConfig) -> dict[str, Any]:
        if self.pad_id is not None and config.pad_id != self.pad_id:  # after which transformers counts positions
            raise ConfigError(f"pad_id is {config.pad_id}; {self.model_type} expects {self.pad_id}")
        found = f"num_labels {config.num_labels}; {self.model_type} expects"
        if config.num_labels and config.masked_lm:
            raise ConfigError(f"masked_lm is true and {found} one head")
        if config.num_labels and config.pooler == "none":
            raise ConfigError(f"pooler is 'none' and {found} a pooler")
        return write_special_ids(config)

    def class_name(self, config: EncoderConfig, head: str = "") -> str:
        """Return the name of the class in transformers."""
        head = "ForMaskedLM" if config.masked_lm else "ForSequenceClassification" if config.num_labels else "Model"
        return super().class_name(config, head)


_OURS = "layers.{i}."


def masked_lm_head(dense: str, norm: str, output: str) -> Tensors:
    """Return the table of the head of masked tokens by the names of its linear map, its norm and its output layer."""
    bias = {f"{output}.bias": same("masked_lm.bias")}
    return {**linear(dense, "masked_lm.linear"), **affine(norm, "masked_lm.norm"), **bias}


def _tied(prefix: str, head: str = "lm_head") -> dict[str, str]:
    """Return the tied tensors of a model with these names of its tensors and of the head of masked tokens."""
    embedding = f"{prefix}.embeddings.word_embeddings.weight"
    return {f"{head}.decoder.weight": embedding, f"{head}.decoder.bias": f"{head}.bias"}


def encoder_tensors(
    prefix: str,
    names: str = "self.query self.key self.value output.dense",
    norms: str = "attention.output.LayerNorm output.LayerNorm",
    maps: str = "intermediate.dense output.dense",
    *,
    layer: str = "encoder.layer.{i}",
    ours: str = _OURS,
) -> Tensors:
    """Return the table of embeddings and layers.

    Args:
        prefix: Prefix of the tensors, e.g. "bert.".
        names: Names of the projections of attention, see `attention`.
        norms: Names of the norms after attention and after the feed-forward network.
        maps: Names of the maps of that network.
        layer: Name of a layer.
        ours: Prefix of the parameters of a layer.
    """
    layer, (first, second) = prefix + layer, norms.split()
    return {
        f"{prefix}embeddings.word_embeddings.weight": same("embedding.weight"),
        f"{prefix}embeddings.token_type_embeddings.weight": same("token_types.weight"),
        f"{prefix}embeddings.position_embeddings.weight": same("input.positions.weight"),
        **affine(f"{prefix}embeddings.LayerNorm", "input.norm"),
        **attention(f"{layer}.attention", ours + "self_attention", names),
        **affine(f"{layer}.{first}", ours + "self_attention_residual.norm"),
        **feed_forward(layer, ours + "feed_forward", maps),
        **affine(f"{layer}.{second}", ours + "feed_forward_residual.norm"),
    }


EncoderTable(
    model_type="bert",
    keys={**sizes("layer_norm_eps", 1e-12), **_TYPES},
    pooler=("tanh", "pooler.dense.weight"),
    masked_lm=("transform.dense.weight",),
    fixed=SAME_ACTIVATION,
    skipped="output_hidden_size pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers "
    "pooler_size_per_head pooler_type directionality",
    tensors=encoder_tensors("bert.")
    | linear("bert.pooler.dense", "pooler.linear")
    | masked_lm_head("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions")
    | linear("classifier", "classifier"),
    tied=_tied("bert", "cls.predictions"),
    ignored=("cls.seq_relationship.*",),
).register()


EncoderTable(
    model_type="electra",
    keys=sizes("layer_norm_eps", 1e-12, 512)
    | _TYPES
    | {"embedding_dim": Key("embedding_size", 128, write=lambda config: config.embedding_dim or config.d_model)},
    pooler=("gelu", "classifier.dense.weight"),
    masked_lm=("generator_predictions.dense.weight",),
    # Without a map that turns them into d_model, if they have as many features
    fixed={"embedding_dim": lambda f: None if f["embedding_dim"] == f["d_model"] else f["embedding_dim"]},
    skipped="summary_type summary_use_proj summary_activation",
    tensors=encoder_tensors("electra.")
    | linear("electra.embeddings_project", "input.projection")
    | masked_lm_head("generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head")
    | linear("classifier.dense", "pooler.linear")
    | linear("classifier.out_proj", "classifier"),
    tied={"generator_lm_head.weight": "electra.embeddings.word_embeddings.weight"},
    ignored=("discriminator_predictions.*",),
).register()

_ALBERT_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"
_ALBERT_NAMES = "attention.LayerNorm full_layer_layer_norm", "ffn ffn_output"
EncoderTable(
    model_type="albert",
    keys={**sizes("layer_norm_eps", 1e-12, 512), **_TYPES, "embedding_dim": Key("embedding_size", 128)},
    activation=activation("hidden_act", "gelu_new"),
    pooler=("tanh", "pooler.weight"),
    masked_lm=("predictions.dense.weight",),
    fixed={**SAME_ACTIVATION, "share_layers": True},
    required={"position_embedding_type": "absolute", "num_hidden_groups": 1, "inner_group_num": 1},
    skipped="down_scale_factor gap_size net_structure_type num_memory_blocks",
    tensors=encoder_tensors("albert.", "query key value dense", *_ALBERT_NAMES, layer=_ALBERT_LAYER, ours="layers.0.")
    | linear("albert.encoder.embedding_hidden_mapping_in", "input.projection")
    | linear("albert.pooler", "pooler.linear")
    | masked_lm_head("predictions.dense", "predictions.LayerNorm", "predictions")
    | linear("classifier", "classifier"),
    tied=_tied("albert", "predictions"),
    ignored=("sop_classifier.*",),
).register()


# --- RoBERTa and MPNet ------------------------------------------------------------------------------------------------


def _positions(default: Any = REQUIRED) -> dict[str, Key]:
    """Return the key of the number of positions, of which the first two are not used."""
    name = "max_position_embeddings"
    return {"max_positions": Key(name, default, read=lambda n: n - 2, write=lambda config: config.max_positions + 2)}


def _roberta_heads(prefix: str, config: EncoderConfig) -> Tensors:
    """Return the table of heads and positions of RoBERTa.

    With a classifier, its first layer takes the role of the pooler.
    """
    return {
        f"{prefix}embeddings.position_embeddings.weight": skip_rows(2, "input.positions.weight"),
        **linear("classifier.dense" if config.num_labels else f"{prefix}pooler.dense", "pooler.linear"),
        **masked_lm_head("lm_head.dense", "lm_head.layer_norm", "lm_head"),
        **linear("classifier.out_proj", "classifier"),
    }


_MPNET_TENSORS = {
    **encoder_tensors("mpnet.", "attn.q attn.k attn.v attn.o", "attention.LayerNorm output.LayerNorm"),
    "mpnet.encoder.relative_attention_bias.weight": same("positions.weight"),
}


_ROBERTA = EncoderTable(
    model_type="roberta",
    keys={**sizes("layer_norm_eps", 1e-12), **_TYPES, **_positions()},
    pooler=("tanh", "pooler.dense.weight", "classifier.dense.weight"),
    masked_lm=("lm_head.dense.weight",),
    pad_id=1,
    tensors=lambda config: encoder_tensors("roberta.") | _roberta_heads("roberta.", config),
    tied=_tied("roberta"),
)
_MPNET = _ROBERTA.variant(
    "mpnet",
    "MPNet",
    keys={**sizes("layer_norm_eps", 1e-12), **_positions(512)},
    fixed={"relative_bias": True},
    required={"relative_attention_num_buckets": 32},
    written={"relative_attention_num_buckets": 32},
    tensors=lambda config: _MPNET_TENSORS | _roberta_heads("mpnet.", config),
    tied=_tied("mpnet"),
)
for _type, _name in {"roberta": "", "xlm-roberta": "XLMRoberta", "camembert": ""}.items():
    _ROBERTA.variant(_type, _name).register()
_MPNET.register()


# --- DistilBERT -------------------------------------------------------------------------------------------------------

_DISTIL_SIZES = (
    "vocab_size num_layers:n_layers,num_hidden_layers d_model:dim,hidden_size num_heads:n_heads,num_attention_heads "
    "d_ff:hidden_dim max_positions:max_position_embeddings"
)
_DISTIL_NAMES = "q_lin k_lin v_lin out_lin", "sa_layer_norm output_layer_norm", "ffn.lin1 ffn.lin2"
EncoderTable(
    model_type="distilbert",
    architecture="DistilBert",
    keys=named(_DISTIL_SIZES),
    activation=activation("activation", "gelu"),
    pooler=("relu", "pre_classifier.weight"),
    masked_lm=("vocab_transform.weight",),
    fixed={**SAME_ACTIVATION, "norm_epsilon": 1e-12},
    required={},
    # Of the first versions; and the file contains the positions either way.
    skipped="tie_weights_ sinusoidal_pos_embds",
    tensors=encoder_tensors("distilbert.", *_DISTIL_NAMES, layer="transformer.layer.{i}")
    | masked_lm_head("vocab_transform", "vocab_layer_norm", "vocab_projector")
    | linear("pre_classifier", "pooler.linear")
    | linear("classifier", "classifier"),
    tied={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
).register()
