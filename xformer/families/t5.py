"""T5, Flan-T5, mT5 and umT5 (Raffel et al., 2020; Xue et al., 2021; Chung et al., 2023)."""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import Layout, attention, feed_forward, same, transposed
from xformer.families.values import read_decoder_ids, read_fields, write_decoder_ids, write_fields
from xformer.models import Transformer, TransformerConfig
from xformer.models.config import GATED

# {feed_forward_proj: activation}
_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu", "gelu": "gelu", "silu": "silu"}

_FIELDS = {
    "d_model": "d_model",
    "num_heads": "num_heads",
    "d_ff": "d_ff",
    "norm_epsilon": "layer_norm_epsilon",
    "relative_buckets": "relative_attention_num_buckets",
    "relative_max_distance": "relative_attention_max_distance",
}
_DEFAULTS = {"norm_epsilon": 1e-6, "relative_buckets": 32, "relative_max_distance": 128}


def _read_config(reader: ConfigReader) -> TransformerConfig:
    reader.skip("n_positions", "output_past", "dense_act_fn", "is_gated_act")
    default_activation = "relu" if reader.model_type == "t5" else "gated-gelu"
    activation = reader.choice("feed_forward_proj", known=_ACTIVATIONS, default=default_activation)
    num_layers, vocab_size = reader.count("num_layers"), reader.count("vocab_size")
    return TransformerConfig(
        source_vocab_size=vocab_size,
        target_vocab_size=vocab_size,
        num_encoder_layers=num_layers,
        num_decoder_layers=reader.count("num_decoder_layers", default=num_layers),
        **read_fields(reader, _FIELDS, **_DEFAULTS),
        head_dim=reader.count("d_kv"),
        activation=_ACTIVATIONS[activation],
        norm="rms",
        attention_bias=False,
        feed_forward_bias=False,
        attention_scale=1.0,
        positions="relative",
        share_relative_bias=reader.model_type != "umt5",
        scale_embeddings=False,
        scale_output=_scales_output(reader),
        share_embeddings=True,
        tie_output="lm_head.weight" in reader.tied,  # tie_word_embeddings does not say so, see `_scales_output`
        dropout=0.0,
        **read_decoder_ids(reader, start=0),
    )


def _scales_output(reader: ConfigReader) -> bool:
    """Return whether the output is scaled: never in mT5, in umT5 and old files of T5 if tie_word_embeddings is true."""
    is_tied = reader.flag("tie_word_embeddings", default=True)
    return reader.model_type != "mt5" and reader.flag("scale_decoder_outputs", default=is_tied)


def _write_config(config: TransformerConfig) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    if config.activation not in names:
        raise ConfigError(f"activation is {config.activation!r}; expected one of {', '.join(names)}")
    model_type = "t5" if config.share_relative_bias else "umt5"
    return {
        "architectures": [f"{model_type.upper()}ForConditionalGeneration"],
        "model_type": model_type,
        "is_encoder_decoder": True,
        "vocab_size": config.source_vocab_size,
        "num_layers": config.num_encoder_layers,
        "num_decoder_layers": config.num_decoder_layers,
        **write_fields(config, _FIELDS),
        "d_kv": config.features_per_head,
        "feed_forward_proj": names[config.activation],
        "scale_decoder_outputs": config.scale_output,
        "tie_word_embeddings": config.scale_output,  # older versions then scale the output
        **write_decoder_ids(config),
    }


def _tensors(config: TransformerConfig) -> dict[str, Layout]:
    return {
        "shared.weight": same("source_embedding.weight"),
        **_stack("encoder", is_gated=config.activation in GATED),
        **_stack("decoder", is_gated=config.activation in GATED),
        "lm_head.weight": transposed("output.weight"),
    }


def _stack(side: str, *, is_gated: bool) -> dict[str, Layout]:
    """Return the layouts of one side, "encoder" or "decoder"."""
    theirs, ours = f"{side}.block.{{i}}.layer.", f"{side}.{{i}}."
    bias = "SelfAttention.relative_attention_bias.weight"
    network = f"{theirs}{1 if side == 'encoder' else 2}."
    tensors = {
        f"{side}.block.0.layer.0.{bias}": same(f"{side}_positions.weight"),
        f"{theirs}0.{bias}": same(f"{side}_positions.{{i}}.weight"),  # umT5
        f"{side}.final_layer_norm.weight": same(f"{side}_norm.weight"),
        f"{theirs}0.layer_norm.weight": same(f"{ours}self_attention_residual.norm.weight"),
        **attention(f"{theirs}0.SelfAttention", f"{ours}self_attention", "q k v o"),
        f"{network}layer_norm.weight": same(f"{ours}feed_forward_residual.norm.weight"),
    }
    if side == "decoder":
        tensors[f"{theirs}1.layer_norm.weight"] = same(f"{ours}cross_attention_residual.norm.weight")
        tensors |= attention(f"{theirs}1.EncDecAttention", f"{ours}cross_attention", "q k v o")
    names = "wi_0 wi_1 wo" if is_gated else "wi wo"
    return tensors | feed_forward(f"{network}DenseReluDense", f"{ours}feed_forward", names)


Family(
    model_types=("t5", "mt5", "umt5"),
    model=Transformer,
    read_config=_read_config,
    write_config=_write_config,
    tied={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    tensors=_tensors,
).register()
