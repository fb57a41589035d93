"""`Decoder`: the table that reads and writes config.json of language models; and tensors with the names of Llama."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from xformer.families.family import Column, Table, Tensors, value_of
from xformer.families.layouts import affine, attention, feed_forward, same, transposed
from xformer.families.values import SWIGLU, read_output, write_output
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.models.base import BaseModel

# Prefixes of the names of tensors and of parameters of a layer
LAYER, OURS = "model.layers.{i}.", "layers.{i}."
_NORMS = {"input_layernorm": "self_attention_residual.norm", "post_attention_layernorm": "feed_forward_residual.norm"}
# {tensor: parameter} of norms on both sides of each sublayer
SANDWICH_NORMS = {
    "input_layernorm": "self_attention_residual.norm",
    "post_attention_layernorm": "self_attention_residual.norm_after",
    "pre_feedforward_layernorm": "feed_forward_residual.norm",
    "post_feedforward_layernorm": "feed_forward_residual.norm_after",
}


def norms_of(norms: Mapping[str, str] = _NORMS, norm: Callable[[str, str], Tensors] = affine) -> Tensors:
    """Return the table of the norms.

    Args:
        norms: {tensor of a layer: parameter}, besides those of queries and keys.
        norm: Function that returns the layouts of a norm from the names of tensor and parameter.
    """
    layouts: Tensors = {}
    of_heads = {"self_attn.q_norm": "self_attention.query_norm", "self_attn.k_norm": "self_attention.key_norm"}
    for tensor, parameter in {**of_heads, **norms}.items():
        layouts |= norm(LAYER + tensor, OURS + parameter)
    return layouts | norm("model.norm", "norm")


def decoder(
    norms: Mapping[str, str] = _NORMS,
    norm: Callable[[str, str], Tensors] = affine,
    *,
    names: str = "gate_proj up_proj down_proj",
    rotated: tuple[int, int] | None = None,
) -> Tensors:
    """Return the whole table; for the arguments, see `norms_of`, `feed_forward` and `attention`."""
    return {
        **norms_of(norms, norm),
        **attention(LAYER + "self_attn", OURS + "self_attention", "q_proj k_proj v_proj o_proj", rotated=rotated),
        **feed_forward(LAYER + "mlp", OURS + "feed_forward", names),
    }


def interleaved_decoder(config: LanguageModelConfig, norms: Mapping[str, str] = _NORMS) -> Tensors:
    """Return the table of a model whose rotary positions rotate neighboring features."""
    return decoder(norms, rotated=(config.features_per_head, config.features_per_head))


@dataclass(frozen=True, kw_only=True)
class Decoder(Table):
    """The config.json of one type of language model.

    Attributes:
        architecture: First part of the name of the class in transformers, e.g. "Llama".
        head: Last part of that name for models with an output matrix.
        activation: Column of the activation; None if the field is fixed and has no key.
        rope: Column of rotary positions; None without them.
        output: Name of the tensor of the output matrix.
        embedding: Name of the tensor of the embedding, which tied models have as output matrix.
        tensors: As in `Family`, without the embedding and the output matrix.
    """

    model: type[BaseModel] = LanguageModel
    head: str = "ForCausalLM"
    activation: Column | None = SWIGLU
    rope: Column | None = None
    output: str = "lm_head.weight"
    embedding: str = "model.embed_tokens.weight"
    prefix: str = "model."
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def of_family(self) -> dict[str, Any]:
        """Return the fields that describe the tensors of the family."""
        ends = {self.embedding: same("embedding.weight"), self.output: transposed("output.weight")}
        whole = {"tensors": lambda config: {**ends, **value_of(self.tensors, config)}}
        return super().of_family() | whole | {"tied": {self.output: self.embedding}}

    def all_columns(self) -> tuple[Column, ...]:
        """Return the columns with those of the activation, rotary positions, the output matrix and special tokens."""
        output = Column(lambda reader, fields: read_output(reader, self.output), write_output)
        return (*filter(None, (self.activation, self.rope)), output, *self.columns)

    def class_name(self, config: LanguageModelConfig, head: str = "") -> str:
        """Return the name of the class in transformers, also that of a base model."""
        return super().class_name(config, self.head if config.has_output else "Model")
