"""ModernBERT (Warner et al., 2024)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, affine, fused, linear, same
from xformer.families.values import (
    ACTIVATION_NAMES,
    SIZES,
    has_tensor,
    read_activation,
    read_fields,
    read_labels,
    read_local_theta,
    read_rope,
    read_special_ids,
    write_activation,
    write_fields,
    write_heads,
    write_local_rope,
    write_windows,
)
from xformer.models import Encoder, EncoderConfig
from xformer.models.config import LAYER_TYPES

_FIELDS = {
    **SIZES,
    "norm_epsilon": "norm_eps",
    "norm_bias": "norm_bias",
    "attention_bias": "attention_bias",
    "feed_forward_bias": "mlp_bias",
    "head_bias": "classifier_bias",
}
_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."


def _read_config(reader: ConfigReader) -> EncoderConfig:
    reader.require("decoder_bias", True)
    reader.require("is_causal", False)
    reader.skip("sparse_prediction", "sparse_pred_ignore_index", "deterministic_flash_attn", "reference_compile")
    reader.skip("repad_logits_with_grad", "initializer_cutoff_factor", "cls_token_id", "position_embedding_type")
    reader.skip("layer_norm_eps")  # norm_eps replaces it
    no_biases = {name: False for name in _FIELDS if name.endswith("bias")}
    fields = read_fields(reader, _FIELDS, max_positions=8192, norm_epsilon=1e-5, **no_biases)
    interval = reader.count("global_attn_every_n_layers", default=3)
    layer_types = ["sliding_attention" if i % interval else "full_attention" for i in range(fields["num_layers"])]
    has_classifier = has_tensor(reader, "classifier.weight")
    activation = read_activation(reader, "classifier_activation", default="gelu")
    pooling = reader.choice("classifier_pooling", known=("cls", "mean"), default="cls")
    return EncoderConfig(
        **fields,
        activation=read_activation(reader, "hidden_activation", default="gelu", gated=True),
        embedding_norm=True,
        first_norm=False,
        positions="rotary",
        window=reader.count("local_attention", default=128, at_least=0) // 2 + 1,  # on each side, with the token
        layer_types=tuple(reader.choices("layer_types", known=LAYER_TYPES, default=layer_types)),
        rope_local_theta=read_local_theta(reader, default=reader.number("local_rope_theta", default=1e4)),
        **read_rope(reader, theta=reader.number("global_rope_theta", default=1.6e5)),
        scale_embeddings=False,
        dropout=0.0,
        pooler=activation if has_classifier else "none",
        pooling=pooling if has_classifier else "cls",
        pooler_norm=has_classifier,
        **read_labels(reader),
        masked_lm=has_tensor(reader, "decoder.bias"),
        masked_lm_activation=activation,
        **read_special_ids(reader, pad_id=50283),
    )


def _write_config(config: EncoderConfig) -> dict[str, Any]:
    activation = config.pooler if config.num_labels else config.masked_lm_activation
    return {
        **write_heads(config, "ModernBert", "modernbert"),
        **write_fields(config, _FIELDS),
        "hidden_activation": write_activation(config, gated=True),
        "classifier_activation": ACTIVATION_NAMES.get(activation),
        "classifier_pooling": config.pooling,
        "local_attention": 2 * ((config.window or 1) - 1),
        "layer_types": write_windows(config)["layer_types"],
        **write_local_rope(config),
    }


def _tensors(config: EncoderConfig) -> dict[str, Layout]:
    attention, feed = f"{_OURS}self_attention", f"{_OURS}feed_forward"
    head = "pooler" if config.num_labels else "masked_lm"
    layouts = {
        "model.embeddings.tok_embeddings.weight": same("embedding.weight"),
        **affine("model.embeddings.norm", "input.norm"),
        **affine(_LAYER + "attn_norm", attention + "_residual.norm"),
        **linear(_LAYER + "attn.Wo", attention + ".output"),
        **affine(_LAYER + "mlp_norm", feed + "_residual.norm"),
        **linear(_LAYER + "mlp.Wo", feed + ".down"),
        **affine("model.final_norm", "norm"),
        **linear("head.dense", head + ".linear"),
        **affine("head.norm", head + ".norm"),
        "decoder.bias": same("masked_lm.bias"),
        **linear("classifier", "classifier"),
    }
    for name, is_matrix in (("weight", True), ("bias", False)):
        parts = (f"{attention}.{part}.{name}" for part in ("query", "key", "value"))
        layouts[f"{_LAYER}attn.Wqkv.{name}"] = fused(*parts, transpose=is_matrix)
        layouts[f"{_LAYER}mlp.Wi.{name}"] = fused(f"{feed}.gate.{name}", f"{feed}.up.{name}", transpose=is_matrix)
    return layouts


register(
    Family(
        model_types=("modernbert",),
        model=Encoder,
        read_config=_read_config,
        write_config=_write_config,
        prefix="model.",
        tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
        ignored=("*.rotary_emb.inv_freq",),
        tensors=_tensors,
    )
)
