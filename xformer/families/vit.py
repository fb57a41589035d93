"""The Vision Transformer, with its pooler or its classifier (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import affine, attention, feed_forward, linear, single_row
from xformer.families.values import (
    SIZES,
    has_tensor,
    read_activation,
    read_fields,
    read_labels,
    write_activation,
    write_fields,
    write_labels,
)
from xformer.models import ImageEncoder, ImageEncoderConfig

FIELDS = {
    **{field: SIZES[field] for field in ("num_layers", "d_model", "num_heads", "d_ff")},
    "num_channels": "num_channels",
    "norm_epsilon": "layer_norm_eps",
    "attention_bias": "qkv_bias",
}
_DEFAULTS: dict[str, Any] = {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 3072, "num_channels": 3}


def read_image_fields(
    reader: ConfigReader, keys: Mapping[str, str], *, patch_size: int, activation: str = "gelu", **defaults: Any
) -> dict[str, Any]:
    """Return the fields that most encoders of images share.

    Args:
        reader: The configuration.
        keys: As for `read_fields`.
        patch_size: Default side of a patch.
        activation: Default activation.
        **defaults: As for `read_fields`, besides those of ViT.
    """
    return {
        **read_fields(reader, keys, **{**_DEFAULTS, **defaults}),
        "image_size": _read_side(reader, "image_size", default=224),
        "patch_size": _read_side(reader, "patch_size", default=patch_size),
        "activation": read_activation(reader, "hidden_act", default=activation),
        "dropout": 0.0,
    }


def write_image_fields(config: ImageEncoderConfig, keys: Mapping[str, str], *, gated: bool = False) -> dict[str, Any]:
    """Return the config.json keys of `read_image_fields`."""
    sizes = {"image_size": config.image_size, "patch_size": config.patch_size}
    return {**sizes, **write_fields(config, keys), "hidden_act": write_activation(config, gated=gated)}


def _read_side(reader: ConfigReader, key: str, *, default: int) -> int:
    """Return the side length of a square; some files have a list of height and width."""
    sides = reader.counts(key, default=default)
    if len(set(sides)) != 1:
        raise CheckpointError(f"{reader.path} has {key} {sides!r:.60}; expected a square")
    return sides[0]


def _read_config(reader: ConfigReader) -> ImageEncoderConfig:
    reader.skip("encoder_stride")  # masked image modeling only
    reader.require("is_causal", False)
    reader.require("pooler_act", "tanh")
    fields = read_image_fields(reader, FIELDS, patch_size=16, norm_epsilon=1e-12, attention_bias=True)
    reader.require("pooler_output_size", fields["d_model"])
    pooler = "tanh" if has_tensor(reader, "pooler.dense.weight") else "none"
    return ImageEncoderConfig(**fields, attention_output_bias=True, pooler=pooler, **read_labels(reader))


def _write_config(config: ImageEncoderConfig) -> dict[str, Any]:
    if config.pooler != "none" and (config.num_labels or config.pooler != "tanh"):
        raise ConfigError(
            f"pooler is {config.pooler!r} and num_labels {config.num_labels}; vit expects 'tanh' or a classifier"
        )
    architecture = "ViTForImageClassification" if config.num_labels else "ViTModel"
    values = write_image_fields(config, FIELDS)
    return {"architectures": [architecture], "model_type": "vit", **values, **write_labels(config)}


_ATTENTION = "attention.query attention.key attention.value output.dense"
_LAYER, _OURS = "vit.encoder.layer.{i}.", "layers.{i}."
Family(
    model_types=("vit",),
    model=ImageEncoder,
    read_config=_read_config,
    write_config=_write_config,
    prefix="vit.",
    tensors={
        "vit.embeddings.cls_token": single_row("embedding.class_token"),
        "vit.embeddings.position_embeddings": single_row("input.positions.weight"),
        **linear("vit.embeddings.patch_embeddings.projection", "embedding"),
        **affine(_LAYER + "layernorm_before", _OURS + "self_attention_residual.norm"),
        **attention(_LAYER + "attention", _OURS + "self_attention", _ATTENTION),
        **affine(_LAYER + "layernorm_after", _OURS + "feed_forward_residual.norm"),
        **feed_forward(_LAYER[:-1], _OURS + "feed_forward", "intermediate.dense output.dense"),
        **affine("vit.layernorm", "norm"),
        **linear("vit.pooler.dense", "pooler.linear"),
        **linear("classifier", "classifier"),
    },
).register()
