"""`Decoder`: the table that reads and writes config.json of language models; and tensors with the names of Llama."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import Layout, affine, attention, feed_forward, same, transposed
from xformer.families.values import (
    SIZES,
    read_activation,
    read_fields,
    read_output,
    read_rope,
    value_of,
    write_activation,
    write_fields,
    write_output,
    write_rope,
    write_windows,
)
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.models.config import GATED

# Prefixes of the names of tensors and of parameters of a layer
LAYER, OURS = "model.layers.{i}.", "layers.{i}."
HEADS = {"num_key_value_heads": "num_key_value_heads", "head_dim": "head_dim"}
HEAD_DEFAULTS = {
    "num_key_value_heads": lambda fields: fields["num_heads"],
    "head_dim": lambda fields: fields["d_model"] // fields["num_heads"],
}
RMS_SIZES = {**SIZES, "norm_epsilon": "rms_norm_eps"}
_NORMS = {"input_layernorm": "self_attention_residual.norm", "post_attention_layernorm": "feed_forward_residual.norm"}
# {tensor: parameter} of norms on both sides of each sublayer
SANDWICH_NORMS = {
    "input_layernorm": "self_attention_residual.norm",
    "post_attention_layernorm": "self_attention_residual.norm_after",
    "pre_feedforward_layernorm": "feed_forward_residual.norm",
    "post_feedforward_layernorm": "feed_forward_residual.norm_after",
}


def embedding_and_norms(
    norms: Mapping[str, str] = _NORMS, norm: Callable[[str, str], dict[str, Layout]] = affine
) -> dict[str, Layout]:
    """Return the table of the embeddings, the norms and the output matrix.

    Args:
        norms: {tensor of a layer: parameter}, besides those of queries and keys.
        norm: Function that returns the layouts of a norm from the names of tensor and parameter.
    """
    layouts = {"model.embed_tokens.weight": same("embedding.weight"), "lm_head.weight": transposed("output.weight")}
    of_heads = {"self_attn.q_norm": "self_attention.query_norm", "self_attn.k_norm": "self_attention.key_norm"}
    for tensor, parameter in {**of_heads, **norms}.items():
        layouts |= norm(LAYER + tensor, OURS + parameter)
    return layouts | norm("model.norm", "norm")


def decoder(
    norms: Mapping[str, str] = _NORMS,
    norm: Callable[[str, str], dict[str, Layout]] = affine,
    *,
    names: str = "gate_proj up_proj down_proj",
    rotated: tuple[int, int] | None = None,
) -> dict[str, Layout]:
    """Return the whole table; for the arguments, see `embedding_and_norms`, `feed_forward` and `attention`."""
    return {
        **embedding_and_norms(norms, norm),
        **attention(LAYER + "self_attn", OURS + "self_attention", "q_proj k_proj v_proj o_proj", rotated=rotated),
        **feed_forward(LAYER + "mlp", OURS + "feed_forward", names),
    }


def interleaved_decoder(config: LanguageModelConfig, norms: Mapping[str, str] = _NORMS) -> dict[str, Layout]:
    """Return the table of a model whose rotary positions rotate neighboring features."""
    return decoder(norms, rotated=(config.features_per_head, config.features_per_head))


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """How the config.json of one type of language model describes it.

    Attributes:
        architecture: Name of the class in transformers.
        keys: {field: key, and after spaces other names of it in old files}, written and read. Fields that are not the
            same in all models of the type are here or in `unwritten`.
        unwritten: The same for keys that are only read, since transformers ignores them or writes their default.
        defaults: Values of absent keys, or functions of the fields that are known by then.
        fixed: Fields that are the same in all models, or functions of the others.
        activation: A gated activation, for which hidden_act must be SiLU; or the key and the default of another one.
            None: the field is fixed and has no key.
        theta: As for `read_rope`; None without rotary positions.
        fraction: As for `read_rope`.
        required: {key: its only value, or a function of the fields that returns it}.
        skipped: Keys that may have any value.
        written: {key: value, or function of the configuration} that are written, too.
        output: Name of the tensor of the output matrix.
        read: Function (reader, fields) -> further fields.
        write: Function (configuration, values) -> values; it may change what the table gives.
    """

    architecture: str
    keys: Mapping[str, str]
    unwritten: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    activation: str | tuple[str, str] | None = "swiglu"
    theta: float | None = None
    fraction: float | None = None
    required: Mapping[str, Any] = field(default_factory=dict)
    skipped: str = ""
    written: Mapping[str, Any] = field(default_factory=dict)
    output: str = "lm_head.weight"
    read: Callable[[ConfigReader, dict[str, Any]], Mapping[str, Any]] = lambda reader, fields: {}
    write: Callable[[LanguageModelConfig, dict[str, Any]], dict[str, Any]] = lambda config, values: values

    def read_config(self, reader: ConfigReader) -> LanguageModelConfig:
        """Translate config.json."""
        reader.skip(*self.skipped.split())
        fields: dict[str, Any] = {"scale_embeddings": False}
        if self.activation in GATED:
            reader.require("hidden_act", "silu", "swish")
            fields["activation"] = self.activation
        fields |= read_fields(reader, {**self.keys, **self.unwritten}, **self.defaults)
        for key, value in self.required.items():
            reader.require(key, value_of(value, fields))
        if isinstance(self.activation, tuple):
            fields["activation"] = read_activation(reader, self.activation[0], default=self.activation[1])
        fields |= {name: value_of(value, fields) for name, value in self.fixed.items()}
        if self.theta is not None:
            fields |= {"positions": "rotary", **read_rope(reader, theta=self.theta, fraction=self.fraction)}
        return LanguageModelConfig(**{**fields, **read_output(reader, self.output), **self.read(reader, fields)})

    def write_config(self, config: LanguageModelConfig, model_type: str) -> dict[str, Any]:
        """Translate a configuration into the values of config.json.

        Raises:
            ConfigError: If the activation is gated, or not, unlike those of the type.
        """
        values = write_fields(config, self.keys)
        if "num_key_value_heads" in values:
            values["num_key_value_heads"] = config.num_key_value_heads or config.num_heads
        if "head_dim" in values:
            values["head_dim"] = config.features_per_head
        if self.activation is not None:
            key = self.activation[0] if isinstance(self.activation, tuple) else "hidden_act"
            values[key] = write_activation(config, gated=self.activation in GATED)
        if self.theta is not None:
            values |= write_rope(config, writes_fraction=self.fraction is not None)
        values |= {key: value_of(value, config) for key, value in self.written.items()}
        replaced = "ForCausalLM|LMHeadModel"
        architecture = self.architecture if config.has_output else re.sub(replaced, "Model", self.architecture)
        values |= {"architectures": [architecture], "model_type": model_type, **write_output(config)}
        return self.write(config, values)


def without_older_rope(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with rope_parameters alone, without the keys of rotary positions that it replaced."""
    older = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    return {key: value for key, value in values.items() if key not in older}


def with_windows(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    """Return values with those of windows."""
    return {**values, **write_windows(config)}


def register_decoders(
    types: Mapping[str, Decoder],
    tensors: Mapping[str, Layout] | Callable[[Any], Mapping[str, Layout]],
    *,
    type_of: Callable[[LanguageModelConfig], str] | None = None,
    prefix: str = "model.",
    tied: Mapping[str, str] | None = None,
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",),
) -> Family:
    """Register a family of language models.

    Args:
        types: {model type: its table}.
        tensors: As in `Family`.
        type_of: Function that returns the model type of a configuration; None if there is one.
        prefix: As in `Family`.
        tied: As in `Family`; default: the embedding and the output matrix of Llama.
        ignored: As in `Family`.
    """

    def write_config(config: LanguageModelConfig) -> dict[str, Any]:
        model_type = next(iter(types)) if type_of is None else type_of(config)
        return types[model_type].write_config(config, model_type)

    return Family(
        model_types=tuple(types),
        model=LanguageModel,
        read_config=lambda reader: types[reader.model_type].read_config(reader),
        write_config=write_config,
        tensors=tensors,
        prefix=prefix,
        tied={"lm_head.weight": "model.embed_tokens.weight"} if tied is None else tied,
        ignored=ignored,
    ).register()
