"""OPT (Zhang et al., 2022)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import affine, attention, linear, same, skip_rows, transposed
from xformer.families.values import SIZES, read_activation, read_fields, read_output, write_activation, write_decoder
from xformer.models import LanguageModel, LanguageModelConfig

_FIELDS = {**SIZES, "d_ff": "ffn_dim"}


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of OPT; refuse models with projected embeddings or post-norm (350M)."""
    fields = read_fields(reader, _FIELDS)
    reader.require("word_embed_proj_dim", fields["d_model"])
    reader.require("do_layer_norm_before", True)
    reader.require("_remove_final_layer_norm", False)
    reader.require("enable_bias", True)
    reader.require("layer_norm_elementwise_affine", True)
    return LanguageModelConfig(
        **fields,
        activation=read_activation(reader, "activation_function", default="relu"),
        positions="learned",
        scale_embeddings=False,
        **read_output(reader),
    )


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config, "opt", "OPTForCausalLM", _FIELDS),
        "word_embed_proj_dim": config.d_model,
        "activation_function": write_activation(config),
        "do_layer_norm_before": True,
    }


_LAYER, _OURS = "model.decoder.layers.{i}.", "layers.{i}."
OPT = register(
    Family(
        model_types=("opt",),
        model=LanguageModel,
        read_config=_read_config,
        write_config=_write_config,
        prefix="model.",
        tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        tensors={
            "model.decoder.embed_tokens.weight": same("embedding.weight"),
            "model.decoder.embed_positions.weight": skip_rows(2, "input.positions.weight"),
            **attention(_LAYER + "self_attn", _OURS + "self_attention"),
            **affine(_LAYER + "self_attn_layer_norm", _OURS + "self_attention_residual.norm"),
            **affine(_LAYER + "final_layer_norm", _OURS + "feed_forward_residual.norm"),
            **linear(_LAYER + "fc1", _OURS + "feed_forward.up"),
            **linear(_LAYER + "fc2", _OURS + "feed_forward.down"),
            **affine("model.decoder.final_layer_norm", "norm"),
            "lm_head.weight": transposed("output.weight"),
        },
    )
)
