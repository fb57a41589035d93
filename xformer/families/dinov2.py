"""DINOv2, a self-supervised Vision Transformer with layer scale (Oquab et al., 2024)."""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import Layout, affine, attention, feed_forward, fused_linear, linear, same, single_row
from xformer.families.values import read_labels, write_labels
from xformer.families.vit import FIELDS, read_image_fields, write_image_fields
from xformer.models import ImageEncoder, ImageEncoderConfig

_FIELDS = {field: key for field, key in FIELDS.items() if field != "d_ff"}
_MAX_RATIO = 64


def _read_config(reader: ConfigReader) -> ImageEncoderConfig:
    reader.require("is_causal", False)
    reader.skip("layerscale_value", "use_mask_token")  # initialization and training only
    reader.skip("out_features", "out_indices", "stage_names", "apply_layernorm", "reshape_hidden_states")  # backbones
    fields = read_image_fields(reader, _FIELDS, patch_size=14, norm_epsilon=1e-6, attention_bias=True)
    ratio, is_gated = reader.count("mlp_ratio", default=4), reader.flag("use_swiglu_ffn", default=False)
    labels = read_labels(reader)
    return ImageEncoderConfig(
        **{**fields, "activation": "swiglu"} if is_gated else fields,
        d_ff=_d_ff(fields["d_model"], ratio, is_gated),
        attention_output_bias=True,
        layer_scale=True,
        resize_positions=True,
        classify_patches=bool(labels.get("num_labels")),
        **labels,
    )


def _d_ff(d_model: int, ratio: int, is_gated: bool) -> int:
    """Return the inner features: gated networks have two thirds, rounded up to a multiple of 8."""
    return (2 * d_model * ratio // 3 + 7) // 8 * 8 if is_gated else d_model * ratio


def _write_config(config: ImageEncoderConfig) -> dict[str, Any]:
    is_gated, sizes = config.activation == "swiglu", range(1, _MAX_RATIO + 1)
    ratio = next((ratio for ratio in sizes if _d_ff(config.d_model, ratio, is_gated) == config.d_ff), None)
    if ratio is None:
        raise ConfigError(f"d_ff is {config.d_ff} and d_model {config.d_model}; dinov2 expects an integer mlp_ratio")
    return {
        "architectures": ["Dinov2ForImageClassification" if config.num_labels else "Dinov2Model"],
        "model_type": "dinov2",
        **write_image_fields(config, _FIELDS, gated=is_gated),
        "mlp_ratio": ratio,
        "use_swiglu_ffn": is_gated,
        "use_mask_token": False,
        **write_labels(config),
    }


def _tensors(config: ImageEncoderConfig) -> dict[str, Layout]:
    names = "attention.query attention.key attention.value output.dense"
    layer, ours = "dinov2.encoder.layer.{i}.", "layers.{i}."
    if config.activation == "swiglu":
        network = fused_linear(f"{layer}mlp.weights_in", f"{ours}feed_forward", "gate up")
        network |= linear(f"{layer}mlp.weights_out", f"{ours}feed_forward.down")
    else:
        network = feed_forward(f"{layer}mlp", f"{ours}feed_forward", "fc1 fc2")
    return {
        "dinov2.embeddings.cls_token": single_row("embedding.class_token"),
        "dinov2.embeddings.position_embeddings": single_row("input.positions.weight"),
        **linear("dinov2.embeddings.patch_embeddings.projection", "embedding"),
        **affine(f"{layer}norm1", f"{ours}self_attention_residual.norm"),
        **attention(f"{layer}attention", f"{ours}self_attention", names),
        f"{layer}layer_scale1.lambda1": same(f"{ours}self_attention_residual.layer_scale"),
        **affine(f"{layer}norm2", f"{ours}feed_forward_residual.norm"),
        **network,
        f"{layer}layer_scale2.lambda1": same(f"{ours}feed_forward_residual.layer_scale"),
        **affine("dinov2.layernorm", "norm"),
        **linear("classifier", "classifier"),
    }


Family(
    model_types=("dinov2",),
    model=ImageEncoder,
    read_config=_read_config,
    write_config=_write_config,
    prefix="dinov2.",
    ignored=("*embeddings.mask_token",),
    tensors=_tensors,
).register()
