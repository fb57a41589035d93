"""The Vision Transformer, with its pooler or its classifier (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import row, same, transposed
from xformer.families.values import (
    activation_of,
    has_tensor,
    labels_of,
    name_of_activation,
    write_labels,
)
from xformer.models import ImageEncoder, ImageEncoderConfig


def read_config(reader: ConfigReader) -> ImageEncoderConfig:
    """Translate the config.json of ViT; the tensors say whether there is a pooler or a classifier."""
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
        activation=activation_of(reader, "hidden_act", default="gelu"),
        norm_epsilon=reader.number("layer_norm_eps", default=1e-12),
        attention_bias=reader.flag("qkv_bias", default=True),
        attention_output_bias=True,
        dropout=0.0,
        pooler="tanh" if has_tensor(reader, "pooler.dense.weight") else "none",
        **labels_of(reader),
    )


def _side(reader: ConfigReader, key: str, *, default: int) -> int:
    """Return the side of a square, which some files give as two equal numbers."""
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
        "hidden_act": name_of_activation(config),
        "layer_norm_eps": config.norm_epsilon,
        "qkv_bias": config.attention_bias,
        **write_labels(config),
    }


_LAYER = "vit.encoder.layer.{i}."
_LINEARS = {
    "attention.attention.query": "self_attention.query",
    "attention.attention.key": "self_attention.key",
    "attention.attention.value": "self_attention.value",
    "attention.output.dense": "self_attention.output",
    "intermediate.dense": "feed_forward.up",
    "output.dense": "feed_forward.down",
}
_AFFINE = {
    **{_LAYER + tensor: "layers.{i}." + parameter for tensor, parameter in _LINEARS.items()},
    "vit.embeddings.patch_embeddings.projection": "embedding",
    "vit.pooler.dense": "pooler.linear",
    "classifier": "classifier",
}
_NORMS = {
    _LAYER + "layernorm_before": "layers.{i}.self_attention_residual.norm",
    _LAYER + "layernorm_after": "layers.{i}.feed_forward_residual.norm",
    "vit.layernorm": "norm",
}

VIT = register(
    Family(
        model_types=("vit",),
        model=ImageEncoder,
        read_config=read_config,
        write_config=write_config,
        prefix="vit.",
        tensors={
            "vit.embeddings.cls_token": row("embedding.class_token"),
            "vit.embeddings.position_embeddings": row("input.positions.weight"),
            **{f"{tensor}.weight": transposed(f"{parameter}.weight") for tensor, parameter in _AFFINE.items()},
            **{f"{tensor}.weight": same(f"{parameter}.weight") for tensor, parameter in _NORMS.items()},
            **{f"{tensor}.bias": same(f"{parameter}.bias") for tensor, parameter in {**_AFFINE, **_NORMS}.items()},
        },
    )
)
