"""Language models with rotary positions whose checkpoints differ from those of Llama in names and values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, affine, attention, feed_forward, same, transposed
from xformer.families.values import (
    SIZES,
    read_activation,
    read_fields,
    read_heads,
    read_rotary_decoder,
    read_windows,
    write_rotary_decoder,
    write_windows,
)
from xformer.models import LanguageModel, LanguageModelConfig

# Prefixes of the names of tensors and of parameters of a layer
LAYER, OURS = "model.layers.{i}.", "layers.{i}."
RMS_SIZES = {**SIZES, "norm_epsilon": "rms_norm_eps"}
_NORMS = {
    "input_layernorm": "self_attention_residual.norm",
    "post_attention_layernorm": "feed_forward_residual.norm",
}
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


def decoder_family(**description: Any) -> Family:
    """Register a family of language models with Llama's names of embeddings and output matrix.

    Args:
        **description: Fields of `Family`.
    """
    return register(
        Family(
            model=LanguageModel,
            prefix="model.",
            tied={"lm_head.weight": "model.embed_tokens.weight"},
            ignored=("*.rotary_emb.inv_freq",),
            **description,
        )
    )


def simple_family(
    model_type: str,
    architecture: str,
    keys: Mapping[str, str],
    *,
    tensors: Mapping[str, Layout] | Callable[[Any], Mapping[str, Layout]],
    defaults: Mapping[str, Any],
    fixed: Mapping[str, Any],
    activation: str | None = None,
    theta: float = 10000.0,
    fraction: float | None = None,
    has_head_dim: bool = True,
    has_window: bool = False,
    skipped: Sequence[str] = (),
    required: Mapping[str, Any] | None = None,
) -> Family:
    """Register a family whose config.json has a key for every field that is not the same in all of its models.

    Args:
        model_type: Value of model_type.
        architecture: Name of the class in transformers.
        keys: {field: key}, as for `read_fields`. Heads of keys and values need none.
        tensors: As in `Family`.
        defaults: Values of absent keys.
        fixed: Fields that are the same in all models.
        activation: Default of hidden_act. None: the activation is gated, with SiLU.
        theta: As for `read_rope`.
        fraction: As for `read_rope`.
        has_head_dim: Whether heads may have another size than hidden size / heads.
        has_window: Whether sliding_window is that of all layers.
        skipped: Keys that may have any value.
        required: The only values of keys.
    """
    is_gated = activation is None

    def read_config(reader: ConfigReader) -> LanguageModelConfig:
        reader.skip(*skipped)
        for key, value in (required or {}).items():
            reader.require(key, value)
        if is_gated:
            reader.require("hidden_act", "silu", "swish")
        fields = read_fields(reader, keys, **defaults)
        if not has_head_dim:
            reader.require("head_dim", fields["d_model"] // fields["num_heads"])
        windows = read_windows(reader, ["sliding_attention"] * fields["num_layers"]) if has_window else {}
        return LanguageModelConfig(
            **{**read_heads(reader, fields), **fields, **fixed, **windows},
            activation="swiglu" if is_gated else read_activation(reader, "hidden_act", default=str(activation)),
            **read_rotary_decoder(reader, theta=theta, fraction=fraction),
        )

    def write_config(config: LanguageModelConfig) -> dict[str, Any]:
        options = {"gated": is_gated, "writes_fraction": fraction is not None}
        window = {"sliding_window": write_windows(config)["sliding_window"]} if has_window else {}
        return {**write_rotary_decoder(config, model_type, architecture, keys, **options), **window}

    return decoder_family(
        model_types=(model_type,), read_config=read_config, write_config=write_config, tensors=tensors
    )
