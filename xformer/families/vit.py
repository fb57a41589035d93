"""The Vision Transformer, with its pooler or its classifier (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import affine, attention, linear, single_row
from xformer.families.values import (
    has_tensor,
    read_activation,
    read_labels,
    write_activation,
    write_labels,
)
from xformer.models import ImageEncoder, ImageEncoderConfig


def read_config(reader: ConfigReader) -> ImageEncoderConfig:
    """Translate the config.json of ViT; the names of the tensors determine the head."""
    reader.skip("hidden_dropout_prob", "attention_probs_dropout_prob", "tie_word_embeddings")
    reader.skip("encoder_stride")  # masked image modeling only
    reader.require("pooler_act", "tanh")
    d_model = reader.count("hidden_size", default=768)
    reader.require("pooler_output_size", d_model)
    return ImageEncoderConfig(
        image_size=_side(reader, "image_size", default=224),
        patch_size=_side(reader, "patch_size", default=16),
        num_channels=reader.count("num_channels", default=3),
        num_layers=reader.count("num_hidden_layers", default=12),
        d_model=d_model,
        num_heads=reader.count("num_attention_heads", default=12),
        d_ff=reader.count("intermediate_size", default=3072),
        activation=read_activation(reader, "hidden_act", default="gelu"),
        norm_epsilon=reader.number("layer_norm_eps", default=1e-12),
        attention_bias=reader.flag("qkv_bias", default=True),
        attention_output_bias=True,
        dropout=0.0,
        pooler="tanh" if has_tensor(reader, "pooler.dense.weight") else "none",
        **read_labels(reader),
    )


def _side(reader: ConfigReader, key: str, *, default: int) -> int:
    """Return the side length of a square; some files have a list of height and width."""
    sides = reader.counts(key, default=default)
    if len(set(sides)) != 1:
        raise CheckpointError(f"{reader.path} has {key} {sides!r:.60}; expected a square")
    return sides[0]


def write_config(config: ImageEncoderConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of ViT."""
    if config.pooler != "none" and (config.num_labels or config.pooler != "tanh"):
        raise ConfigError(
            f"pooler is {config.pooler!r} and num_labels {config.num_labels}; vit expects 'tanh' or a classifier"
        )
    return {
        "architectures": ["ViTForImageClassification" if config.num_labels else "ViTModel"],
        "model_type": "vit",
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.num_channels,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.d_ff,
        "hidden_act": write_activation(config),
        "layer_norm_eps": config.norm_epsilon,
        "qkv_bias": config.attention_bias,
        **write_labels(config),
    }


_LAYER, _OURS = "vit.encoder.layer.{i}.", "layers.{i}."
VIT = register(
    Family(
        model_types=("vit",),
        model=ImageEncoder,
        read_config=read_config,
        write_config=write_config,
        prefix="vit.",
        tensors={
            "vit.embeddings.cls_token": single_row("embedding.class_token"),
            "vit.embeddings.position_embeddings": single_row("input.positions.weight"),
            **linear("vit.embeddings.patch_embeddings.projection", "embedding"),
            **affine(_LAYER + "layernorm_before", _OURS + "self_attention_residual.norm"),
            **attention(
                _LAYER + "attention",
                _OURS + "self_attention",
                query="attention.query",
                key="attention.key",
                value="attention.value",
                output="output.dense",
            ),
            **affine(_LAYER + "layernorm_after", _OURS + "feed_forward_residual.norm"),
            **linear(_LAYER + "intermediate.dense", _OURS + "feed_forward.up"),
            **linear(_LAYER + "output.dense", _OURS + "feed_forward.down"),
            **affine("vit.layernorm", "norm"),
            **linear("vit.pooler.dense", "pooler.linear"),
            **linear("classifier", "classifier"),
        },
    )
)
