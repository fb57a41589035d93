"""CLIP (Radford et al., 2021) and SigLIP (Zhai et al., 2023): an encoder of texts and one of images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.errors import ConfigError
from xformer.families.family import Column, ConfigReader, Key, Table, Tensors
from xformer.families.layouts import (
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
from xformer.families.values import activation, sizes
from xformer.families.vit import image_keys, sides
from xformer.models import Encoder, EncoderConfig, ImageEncoder, ImageTextEncoder

_OLD_EOS = 2  # in files from before transformers 4.31, it stands for the highest id of a text


# --- Configuration; that of old checkpoints has only the values that differ from the defaults -----------------------


def _write_eos_id(config: EncoderConfig) -> int:
    if config.eos_id in (None, _OLD_EOS):
        raise ConfigError(f"eos_id of text is {config.eos_id}; clip expects an id other than {_OLD_EOS}")
    return config.eos_id


_SKIPPED = "projection_dim bos_token_id eos_token_id pad_token_id projection_size"
_CLIP_TEXT = Table(
    model_type="clip_text_model",
    model=Encoder,
    keys=sizes("layer_norm_eps", 1e-5, 77, vocab_size=49408, num_layers=12, d_model=512, num_heads=8, d_ff=2048)
    | {"eos_id": Key("eos_token_id", 49407, write=_write_eos_id)},
    columns=(activation("hidden_act", "quick_gelu"),),
    fixed={"positions": "learned", "dropout": 0.0, "scale_embeddings": False, "causal": True}
    | {"pooler": "identity", "pooling": "last", "pad_id": None, "head_bias": False}
    | {"eos_id": lambda fields: fields["vocab_size"] - 1 if fields["eos_id"] == _OLD_EOS else fields["eos_id"]},
    skipped=_SKIPPED,
)
_CLIP_IMAGE = Table(
    model_type="clip_vision_model",
    model=ImageEncoder,
    keys=image_keys(1e-5),
    columns=(sides(32), activation("hidden_act", "quick_gelu")),
    fixed={"pooler": "identity", "patch_bias": False, "embedding_norm": True, "head_bias": False},
    skipped=_SKIPPED,
)
_SIGLIP_TEXT = _CLIP_TEXT.variant(
    "siglip_text_model",
    keys=sizes("layer_norm_eps", 1e-6, 64, vocab_size=32000, num_layers=12, d_model=768, num_heads=12, d_ff=3072)
    | {"projection_dim": Key("projection_size", lambda fields: fields["d_model"], write=lambda c: c.pooled_features)},
    columns=(activation("hidden_act", "gelu_pytorch_tanh"),),
    fixed={**_CLIP_TEXT.fixed, "causal": False, "head_bias": True, "eos_id": None},
)
_SIGLIP_IMAGE = _CLIP_IMAGE.variant(
    "siglip_vision_model",
    keys=image_keys(1e-6),
    columns=(sides(16), activation("hidden_act", "gelu_pytorch_tanh")),
    fixed={"pooler": "attention", "class_token": False},
    required={"vision_use_head": True},
)


def _sections(text: Table, image: Table) -> Column:
    """Return the column of the sections of both encoders."""
    parts = {"text": ("text_config", text), "image": ("vision_config", image)}

    def read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
        configs = {}
        for name, (key, table) in parts.items():
            section, preferred = reader.section(key), reader.section(f"{key}_dict")  # of old files, in transformers
            section = section if reader.values.get(f"{key}_dict") is None else preferred
            configs[name] = table.read_config(section)
            section.finish()
        return configs

    return Column(read, lambda c: {key: table.write_config(getattr(c, name)) for name, (key, table) in parts.items()})


def _read_projection(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    size = reader.count("projection_dim", default=512)
    return {name: replace(config, projection_dim=size) for name, config in fields.items()}


# --- Tensors ----------------------------------------------------------------------------------------------------------


def _layers(tensor: str, parameter: str) -> Tensors:
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
Table(
    model_type="clip",
    architecture="CLIPModel",
    model=ImageTextEncoder,
    columns=(
        _sections(_CLIP_TEXT, _CLIP_IMAGE),
        Column(_read_projection, lambda config: {"projection_dim": config.text.pooled_features}),
    ),
    skipped="logit_scale_init_value",
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
Table(
    model_type="siglip",
    architecture="SiglipModel",
    model=ImageTextEncoder,
    columns=(_sections(_SIGLIP_TEXT, _SIGLIP_IMAGE),),
    fixed={"sigmoid": True},
    ignored=("*.position_ids",),
    tensors={
        **_SHARED,
        **linear("text_model.head", "text.pooler.linear"),
        f"{_HEAD}probe": single_row(f"{_POOLER}query"),
        f"{_HEAD}attention.in_proj_weight": fused(*(f"{name}.weight" for name in _PROJECTIONS)),
        f"{_HEAD}attention.in_proj_bias": fused(*(f"{name}.bias" for name in _PROJECTIONS)),
        **linear(f"{_HEAD}attention.out_proj", f"{_POOLER}attention.output"),
        **affine(f"{_HEAD}layernorm", f"{_POOLER}residual.norm"),
        **feed_forward(f"{_HEAD}mlp", f"{_POOLER}feed_forward", "fc1 fc2"),
        "logit_scale": same("logit_scale"),
        "logit_bias": same("logit_bias"),
    },
).register()
