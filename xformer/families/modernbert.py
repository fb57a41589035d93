"""ModernBERT (Warner et al., 2024)."""

from __future__ import annotations

from typing import Any

from xformer.families.bert import EncoderTable
from xformer.families.family import Column, ConfigReader, Key, Tensors
from xformer.families.layouts import affine, fused_linear, linear, same
from xformer.families.values import ACTIVATION_NAMES, activation, local_rope, read_activation, sizes, write_windows
from xformer.models import EncoderConfig
from xformer.models.config import LAYER_TYPES

_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."


def _read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    interval = reader.count("global_attn_every_n_layers", default=3)
    layer_types = ["sliding_attention" if i % interval else "full_attention" for i in range(fields["num_layers"])]
    has_classifier = fields["pooler"] != "none"
    activation = read_activation(reader, "classifier_activation", default="gelu")
    pooling = reader.choice("classifier_pooling", known=("cls", "mean"), default="cls")
    return {
        "window": reader.count("local_attention", default=128, at_least=0) // 2 + 1,  # on each side, with the token
        "layer_types": tuple(reader.choices("layer_types", known=LAYER_TYPES, default=layer_types)),
        "pooler": activation if has_classifier else "none",
        "pooling": pooling if has_classifier else "cls",
        "pooler_norm": has_classifier,
        "masked_lm_activation": activation,
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    activation = config.pooler if config.num_labels else config.masked_lm_activation
    return {
        "classifier_activation": ACTIVATION_NAMES.get(activation),
        "classifier_pooling": config.pooling,
        "local_attention": 2 * ((config.window or 1) - 1),
        "layer_types": write_windows(config)["layer_types"],
    }


def _tensors(config: EncoderConfig) -> Tensors:
    attention, feed = f"{_OURS}self_attention", f"{_OURS}feed_forward"
    head = "pooler" if config.num_labels else "masked_lm"
    return {
        "model.embeddings.tok_embeddings.weight": same("embedding.weight"),
        **affine("model.embeddings.norm", "input.norm"),
        **affine(_LAYER + "attn_norm", attention + "_residual.norm"),
        **fused_linear(_LAYER + "attn.Wqkv", attention, "query key value"),
        **linear(_LAYER + "attn.Wo", attention + ".output"),
        **affine(_LAYER + "mlp_norm", feed + "_residual.norm"),
        **fused_linear(_LAYER + "mlp.Wi", feed, "gate up"),
        **linear(_LAYER + "mlp.Wo", feed + ".down"),
        **affine("model.final_norm", "norm"),
        **linear("head.dense", head + ".linear"),
        **affine("head.norm", head + ".norm"),
        "decoder.bias": same("masked_lm.bias"),
        **linear("classifier", "classifier"),
    }


EncoderTable(
    model_type="modernbert",
    architecture="ModernBert",
    keys={
        **sizes("norm_eps", 1e-5, 8192),
        "norm_bias": Key("norm_bias", False),
        "attention_bias": Key("attention_bias", False),
        "feed_forward_bias": Key("mlp_bias", False),
        "head_bias": Key("classifier_bias", False),
    },
    activation=activation("hidden_activation", "gelu", gated=True),
    columns=(local_rope(1.6e5, 1e4, key="global_rope_theta", local_key="local_rope_theta"), Column(_read, _write)),
    pooler=("gelu", "classifier.weight"),
    masked_lm=("decoder.bias",),
    default_pad_id=50283,
    fixed={"norm_position": "pre", "first_norm": False},
    required={"decoder_bias": True},
    # norm_eps replaces layer_norm_eps.
    skipped="sparse_prediction sparse_pred_ignore_index deterministic_flash_attn reference_compile layer_norm_eps "
    "repad_logits_with_grad initializer_cutoff_factor cls_token_id position_embedding_type",
    tensors=_tensors,
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    ignored=("*.rotary_emb.inv_freq",),
).register()
