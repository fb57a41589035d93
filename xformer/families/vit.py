"""The Vision Transformer, with its pooler or its classifier (Dosovitskiy et al., 2021), and DINOv2.

The latter is a self-supervised Vision Transformer with layer scale (Oquab et al., 2024).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.family import Column, ConfigReader, Key, Table, Tensors
from xformer.families.layouts import affine, attention, feed_forward, fused_linear, linear, same, single_row
from xformer.families.values import LABELS, activation, has_tensor, read_activation, sizes, write_activation
from xformer.models import ImageEncoder, ImageEncoderConfig

_MAX_RATIO = 64
_LAYER, _OURS = ".encoder.layer.{i}.", "layers.{i}."


def image_keys(epsilon: float) -> dict[str, Key]:
    """Return the keys that most encoders of images share."""
    keys = sizes("layer_norm_eps", epsilon, num_layers=12, d_model=768, num_heads=12, d_ff=3072)
    del keys["vocab_size"], keys["max_positions"]
    return {**keys, "num_channels": Key("num_channels", 3)}


def sides(patch_size: int) -> Column:
    """Return the column of the sides of images and patches, by the default of the latter."""

    def read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
        sizes = {"image_size": 224, "patch_size": patch_size}
        return {"dropout": 0.0, **{key: _read_side(reader, key, default=size) for key, size in sizes.items()}}

    return Column(read, lambda config: {"image_size": config.image_size, "patch_size": config.patch_size})


def _read_side(reader: ConfigReader, key: str, *, default: int) -> int:
    """Return the side length of a square; some files have a list of height and width."""
    sides = reader.counts(key, default=default)
    if len(set(sides)) != 1:
        raise CheckpointError(f"{reader.path} has {key} {sides!r:.60}; expected a square")
    return sides[0]


def _layers(name: str, norms: str, network: Tensors) -> Tensors:
    """Return the table of the embeddings and the layers.

    Args:
        name: First part of the names of the tensors.
        norms: Names of the norms before attention and before the feed-forward network.
        network: Table of the feed-forward network.
    """
    layer, (first, second) = name + _LAYER, norms.split()
    names = "attention.query attention.key attention.value output.dense"
    return {
        f"{name}.embeddings.cls_token": single_row("embedding.class_token"),
        f"{name}.embeddings.position_embeddings": single_row("input.positions.weight"),
        **linear(f"{name}.embeddings.patch_embeddings.projection", "embedding"),
        **affine(layer + first, _OURS + "self_attention_residual.norm"),
        **attention(layer + "attention", _OURS + "self_attention", names),
        **affine(layer + second, _OURS + "feed_forward_residual.norm"),
        **network,
        **affine(f"{name}.layernorm", "norm"),
        **linear("classifier", "classifier"),
    }


# --- ViT --------------------------------------------------------------------------------------------------------------


def _read_pooler(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    return {"pooler": "tanh" if not reader.classes and has_tensor(reader, "pooler.dense.weight") else "none"}


def _check_pooler(config: ImageEncoderConfig) -> dict[str, Any]:
    if config.pooler != "none" and (config.num_labels or config.pooler != "tanh"):
        received = f"pooler is {config.pooler!r} and num_labels {config.num_labels}"
        raise ConfigError(f"{received}; vit expects 'tanh' or a classifier")
    return {}


Table(
    model_type="vit",
    architecture=lambda config: "ViTForImageClassification" if config.num_labels else "ViTModel",
    model=ImageEncoder,
    keys={**image_keys(1e-12), "attention_bias": Key("qkv_bias", True)},
    columns=(sides(16), activation("hidden_act", "gelu"), LABELS, Column(_read_pooler, _check_pooler)),
    fixed={"attention_output_bias": True},
    required={"is_causal": False, "pooler_act": "tanh", "pooler_output_size": lambda fields: fields["d_model"]},
    skipped="encoder_stride",  # masked image modeling only
    tensors=_layers(
        "vit",
        "layernorm_before layernorm_after",
        feed_forward(f"vit{_LAYER[:-1]}", _OURS + "feed_forward", "intermediate.dense output.dense"),
    )
    | linear("vit.pooler.dense", "pooler.linear"),
    prefix="vit.",
).register()


# --- DINOv2 -----------------------------------------------------------------------------------------------------------


def _read_network(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    ratio, is_gated = reader.count("mlp_ratio", default=4), reader.flag("use_swiglu_ffn", default=False)
    function = read_activation(reader, "hidden_act", default="gelu")
    return {"activation": "swiglu" if is_gated else function, "d_ff": _d_ff(fields["d_model"], ratio, is_gated)}


def _write_network(config: ImageEncoderConfig) -> dict[str, Any]:
    is_gated, sizes = config.activation == "swiglu", range(1, _MAX_RATIO + 1)
    ratio = next((ratio for ratio in sizes if _d_ff(config.d_model, ratio, is_gated) == config.d_ff), None)
    if ratio is None:
        raise ConfigError(f"d_ff is {config.d_ff} and d_model {config.d_model}; dinov2 expects an integer mlp_ratio")
    function = write_activation(config, gated=is_gated)
    return {"hidden_act": function, "mlp_ratio": ratio, "use_swiglu_ffn": is_gated}


def _d_ff(d_model: int, ratio: int, is_gated: bool) -> int:
    """Return the inner features: gated networks have two thirds, rounded up to a multiple of 8."""
    return (2 * d_model * ratio // 3 + 7) // 8 * 8 if is_gated else d_model * ratio


def _dinov2_tensors(config: ImageEncoderConfig) -> Tensors:
    layer = "dinov2" + _LAYER
    if config.activation == "swiglu":
        network = fused_linear(f"{layer}mlp.weights_in", f"{_OURS}feed_forward", "gate up")
        network |= linear(f"{layer}mlp.weights_out", f"{_OURS}feed_forward.down")
    else:
        network = feed_forward(f"{layer}mlp", f"{_OURS}feed_forward", "fc1 fc2")
    return {
        **_layers("dinov2", "norm1 norm2", network),
        f"{layer}layer_scale1.lambda1": same(f"{_OURS}self_attention_residual.layer_scale"),
        f"{layer}layer_scale2.lambda1": same(f"{_OURS}feed_forward_residual.layer_scale"),
    }


_KEYS = {field: key for field, key in image_keys(1e-6).items() if field != "d_ff"}
Table(
    model_type="dinov2",
    architecture=lambda config: "Dinov2ForImageClassification" if config.num_labels else "Dinov2Model",
    model=ImageEncoder,
    keys={**_KEYS, "attention_bias": Key("qkv_bias", True)},
    columns=(sides(14), LABELS, Column(_read_network, _write_network)),
    fixed={"attention_output_bias": True, "layer_scale": True, "resize_positions": True}
    | {"classify_patches": lambda fields: bool(fields.get("num_labels"))},
    required={"is_causal": False},
    # The first two are for initialization and training, the others for backbones.
    skipped="layerscale_value use_mask_token out_features out_indices stage_names apply_layernorm "
    "reshape_hidden_states",
    written={"use_mask_token": False},
    tensors=_dinov2_tensors,
    prefix="dinov2.",
    ignored=("*embeddings.mask_token",),
).register()
