"""T5, Flan-T5, mT5 and umT5 (Raffel et al., 2020; Xue et al., 2021; Chung et al., 2023)."""

from __future__ import annotations

from typing import Any

from xformer.errors import check_choice
from xformer.families.family import Column, ConfigReader, Key, Table, Tensors
from xformer.families.layouts import attention, feed_forward, same, transposed
from xformer.families.values import named, read_decoder_ids, write_decoder_ids
from xformer.models import Transformer, TransformerConfig
from xformer.models.config import GATED

# {feed_forward_proj: activation}
_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu", "gelu": "gelu", "silu": "silu"}


def _read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    default = "relu" if reader.model_type == "t5" else "gated-gelu"
    # In umT5 and old files of T5, tie_word_embeddings says whether the output is scaled.
    is_scaled = reader.flag("scale_decoder_outputs", default=reader.flag("tie_word_embeddings", default=True))
    return {
        "activation": _ACTIVATIONS[reader.choice("feed_forward_proj", known=_ACTIVATIONS, default=default)],
        "scale_output": reader.model_type != "mt5" and is_scaled,
        "tie_output": "lm_head.weight" in reader.tied,
        **read_decoder_ids(reader, start=0),
    }


def _write(config: TransformerConfig) -> dict[str, Any]:
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    check_choice("activation", config.activation, names)
    return {
        "feed_forward_proj": names[config.activation],
        "scale_decoder_outputs": config.scale_output,
        "tie_word_embeddings": config.scale_output,  # older versions then scale the output
        **write_decoder_ids(config),
    }


def _tensors(config: TransformerConfig) -> Tensors:
    return {
        "shared.weight": same("source_embedding.weight"),
        **_stack("encoder", is_gated=config.activation in GATED),
        **_stack("decoder", is_gated=config.activation in GATED),
        "lm_head.weight": transposed("output.weight"),
    }


def _stack(side: str, *, is_gated: bool) -> Tensors:
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


_T5 = Table(
    model_type="t5",
    architecture="T5ForConditionalGeneration",
    model=Transformer,
    keys={
        **named("source_vocab_size:vocab_size num_encoder_layers:num_layers d_model num_heads d_ff"),
        "num_decoder_layers": Key("num_decoder_layers", lambda fields: fields["num_encoder_layers"]),
        "head_dim": Key("d_kv", write=lambda config: config.features_per_head),
        **named("norm_epsilon:layer_norm_epsilon=1e-6 relative_buckets:relative_attention_num_buckets=32"),
        **named("relative_max_distance:relative_attention_max_distance=128"),
    },
    columns=(Column(_read, _write),),
    fixed={"target_vocab_size": lambda fields: fields["source_vocab_size"], "norm": "rms", "positions": "relative"}
    | {"attention_bias": False, "feed_forward_bias": False, "attention_scale": 1.0}
    | {"scale_embeddings": False, "share_embeddings": True, "dropout": 0.0},
    skipped="n_positions output_past dense_act_fn is_gated_act",
    written={"is_encoder_decoder": True},
    tensors=_tensors,
    tied=dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), "shared.weight"
    ),
    ignored=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
)
_MT5 = _T5.variant("mt5", "MT5ForConditionalGeneration", required={"scale_decoder_outputs": False})
_UMT5 = _T5.variant("umt5", "UMT5ForConditionalGeneration", fixed={**_T5.fixed, "share_relative_bias": False})
_T5.register(_MT5, _UMT5)
