"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023): an encoder of texts and one of images."""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import (
    Layout,
    affine,
    attention,
    feed_forward,
    fused,
    linear,
    same,
    single_row,
    transposed,
    without_row_axis,
)
from xformer.families.values import SIZES, read_activation, read_fields, write_activation, write_fields
from xformer.families.vit import FIELDS, read_image_fields, write_image_fields
from xformer.models import EncoderConfig, ImageEncoderConfig, ImageTextEncoder, ImageTextEncoderConfig

_TEXT_FIELDS = {**SIZES, "norm_epsilon": "layer_norm_eps"}
_IMAGE_FIELDS = {field: key for field, key in FIELDS.items() if field != "attention_bias"}
# Defaults of transformers: config.json of old checkpoints has only the values that differ.
_CLIP: dict[str, Any] = {"activation": "quick_gelu", "norm_epsilon": 1e-5}
_SIGLIP: dict[str, Any] = {"activation": "gelu_pytorch_tanh", "norm_epsilon": 1e-6}
_CLIP_TEXT = {"num_layers": 12, "d_model": 512, "num_heads": 8, "d_ff": 2048, "vocab_size": 49408, "max_positions": 77}
_SIGLIP_TEXT = {**_CLIP_TEXT, "d_model": 768, "num_heads": 12, "d_ff": 3072, "vocab_size": 32000, "max_positions": 64}
_TEXT: dict[str, Any] = {
    "positions": "learned",
    "dropout": 0.0,
    "scale_embeddings": False,
    "pooler": "identity",
    "pooling": "last",
    "pad_id": None,
}
_OLD_EOS = 2  # in files from before transformers 4.31, it stands for the highest id of a text


def read_clip_config(reader: ConfigReader) -> ImageTextEncoderConfig:
    """Translate the config.json of CLIP."""
    reader.skip("logit_scale_init_value")
    text, image = _section(reader, "text_config"), _section(reader, "vision_config")
    head = {"projection_dim": reader.count("projection_dim", default=512), "head_bias": False}
    text_fields = {**_TEXT, **head, "causal": True, **_read_text(text, _CLIP_TEXT, **_CLIP)}
    eos_id = text.count("eos_token_id", default=49407)
    text_fields["eos_id"] = text_fields["vocab_size"] - 1 if eos_id == _OLD_EOS else eos_id
    image_fields: dict[str, Any] = {**head, "pooler": "identity", "patch_bias": False, "embedding_norm": True}
    image_fields |= read_image_fields(image, _IMAGE_FIELDS, patch_size=32, **_CLIP)
    text.finish()
    image.finish()
    return ImageTextEncoderConfig(text=EncoderConfig(**text_fields), image=ImageEncoderConfig(**image_fields))


def read_siglip_config(reader: ConfigReader) -> ImageTextEncoderConfig:
    """Translate the config.json of SigLIP."""
    text, image = _section(reader, "text_config"), _section(reader, "vision_config")
    image.require("vision_use_head", True)
    text_fields = {**_TEXT, "eos_id": None, **_read_text(text, _SIGLIP_TEXT, **_SIGLIP)}
    text_fields["projection_dim"] = text.count("projection_size", default=text_fields["d_model"])
    image_fields: dict[str, Any] = {"pooler": "attention", "class_token": False}
    image_fields |= read_image_fields(image, _IMAGE_FIELDS, patch_size=16, **_SIGLIP)
    text.finish()
    image.finish()
    text_config, image_config = EncoderConfig(**text_fields), ImageEncoderConfig(**image_fields)
    return ImageTextEncoderConfig(text=text_config, image=image_config, sigmoid=True)


def _section(reader: ConfigReader, key: str) -> ConfigReader:
    """Return the reader of one encoder. Old files have its values under another key too, which transformers prefers."""
    section, preferred = reader.section(key), reader.section(f"{key}_dict")
    section = section if reader.values.get(f"{key}_dict") is None else preferred
    section.skip("projection_dim")
    section.skip("bos_token_id", "eos_token_id", "pad_token_id", "projection_size")
    return section


def _read_text(
    section: ConfigReader, defaults: dict[str, Any], *, activation: str, norm_epsilon: float
) -> dict[str, Any]:
    """Return the sizes and the activation of the encoder of texts."""
    fields = read_fields(section, _TEXT_FIELDS, **defaults, norm_epsilon=norm_epsilon)
    return {**fields, "activation": read_activation(section, "hidden_act", default=activation)}


def write_config(config: ImageTextEncoderConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of CLIP or SigLIP."""
    text, image = config.text, config.image
    name, model_type = ("Siglip", "siglip") if config.sigmoid else ("CLIP", "clip")
    text_values = {**write_fields(text, _TEXT_FIELDS), "hidden_act": write_activation(text)}
    image_values = write_image_fields(image, _IMAGE_FIELDS)
    values: dict[str, Any] = {"architectures": [f"{name}Model"], "model_type": model_type}
    if config.sigmoid:
        text_values["projection_size"] = text.pooled_features
    else:
        if text.eos_id in (None, _OLD_EOS):
            raise ConfigError(f"eos_id of text is {text.eos_id}; clip expects an id other than {_OLD_EOS}")
        text_values["eos_token_id"] = text.eos_id
        values["projection_dim"] = text.pooled_features
    text_values["model_type"], image_values["model_type"] = f"{model_type}_text_model", f"{model_type}_vision_model"
    return {**values, "text_config": text_values, "vision_config": image_values}


def _layers(tensor: str, parameter: str) -> dict[str, Layout]:
    """Return the table of the embeddings of positions and of the layers of an encoder."""
    layer, ours = f"{tensor}.encoder.layers.{{i}}.", f"{parameter}.layers.{{i}}."
    return {
        f"{tensor}.embeddings.position_embedding.weight": same(f"{parameter}.input.positions.weight"),
        **affine(f"{layer}layer_norm1", f"{ours}self_attention_residual.norm"),
        **attention(f"{layer}self_attn", f"{ours}self_attention"),
        **affine(f"{layer}layer_norm2", f"{ours}feed_forward_residual.norm"),
        **feed_forward(f"{layer}mlp", f"{ours}feed_forward", "fc1 fc2"),
    }


_SHARED = {
    "text_model.embeddings.token_embedding.weight": same("text.embedding.weight"),
    **_layers("text_model", "text"),
    **affine("text_model.final_layer_norm", "text.norm"),
    **linear("vision_model.embeddings.patch_embedding", "image.embedding"),
    **_layers("vision_model", "image"),
    **affine("vision_model.post_layernorm", "image.norm"),
}
_HEAD, _POOLER = "vision_model.head.", "image.pooler."
_PROJECTIONS = [f"{_POOLER}attention.{part}" for part in ("query", "key", "value")]
Family(
    model_types=("clip",),
    model=ImageTextEncoder,
    read_config=read_clip_config,
    write_config=write_config,
    ignored=("*.position_ids",),
    tensors={
        **_SHARED,
        "vision_model.embeddings.class_embedding": without_row_axis("image.embedding.class_token"),
        **affine("vision_model.pre_layrnorm", "image.input.norm"),
        "text_projection.weight": transposed("text.pooler.linear.weight"),
        "visual_projection.weight": transposed("image.pooler.linear.weight"),
        "logit_scale": without_row_axis("logit_scale"),
    },
).register()
Family(
    model_types=("siglip",),
    model=ImageTextEncoder,
    read_config=read_siglip_config,
    write_config=write_config,
    ignored=("*.position_ids",),
    tensors={
        **_SHARED,
        **linear("text_model.head", "text.pooler.linear"),
        f"{_HEAD}probe": single_row(f"{_POOLER}query"),
        f"{_HEAD}attention.in_proj_weight": fused(*(f"{name}.weight" for name in _PROJECTIONS), transpose=True),
        f"{_HEAD}attention.in_proj_bias": fused(*(f"{name}.bias" for name in _PROJECTIONS)),
        **linear(f"{_HEAD}attention.out_proj", f"{_POOLER}attention.output"),
        **affine(f"{_HEAD}layernorm", f"{_POOLER}residual.norm"),
        **feed_forward(f"{_HEAD}mlp", f"{_POOLER}feed_forward", "fc1 fc2"),
        "logit_scale": same("logit_scale"),
        "logit_bias": same("logit_bias"),
    },
).register()
