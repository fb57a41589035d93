"""Gemma 2, the text models of Gemma 3 (Gemma team, 2024 and 2025), and T5Gemma (Zhang et al., 2025).

T5Gemma is an encoder-decoder adapted from Gemma 2.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.decoder import SANDWICH_NORMS, Decoder, decoder
from xformer.families.family import REQUIRED, Column, ConfigReader, Key, Table, Tensors
from xformer.families.layouts import attention, feed_forward, plus_one, same, transposed
from xformer.families.values import (
    every_nth_full,
    heads,
    local_rope,
    read_decoder_ids,
    read_tied,
    sizes,
    windows,
    write_output,
    write_rope,
)
from xformer.models import LanguageModelConfig, ModelConfig, Transformer, TransformerConfig


def _query_scalar(config: LanguageModelConfig) -> int:
    scale = config.attention_scale or config.features_per_head**-0.5
    scalar = round(scale**-2)  # transformers expects an integer
    if abs(scale**-2 - scalar) > 1e-6 * scalar:
        raise ConfigError(f"attention_scale is {scale}; expected 1 / sqrt(n) with an integer n")
    return scalar


def _norm(tensor: str, parameter: str) -> Tensors:
    return {f"{tensor}.weight": plus_one(f"{parameter}.weight")}


_LOCAL_ROPE = local_rope(1e4, 1e4, local_key="rope_local_base_freq")
_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}
_FIXED = {"norm": "rms", "norm_position": "sandwich", "feed_forward_bias": False, "scale_embeddings": True}
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_GEMMA2 = Decoder(
    model_type="gemma2",
    keys={
        **sizes("rms_norm_eps", 1e-6, 8192),
        **heads(REQUIRED, 256),
        "attention_bias": Key("attention_bias", False),
        "attention_scale": Key("query_pre_attn_scalar", 256.0, read=lambda x: x**-0.5, write=_query_scalar),
        "attention_softcap": Key("attn_logit_softcapping", None, float),
        "logits_softcap": Key("final_logit_softcapping", None, float),
    },
    fixed={**_FIXED, "activation": "geglu_tanh", "rope_local_theta": None},
    activation=None,
    rope=Column(_LOCAL_ROPE.read, lambda config: {"rope_parameters": write_rope(config)["rope_parameters"]}),
    columns=(windows(every_nth_full(2, *_PATTERN), default=4096),),
    required={"use_bidirectional_attention": False, **_ACTIVATION},
    written=_ACTIVATION,
    skipped="cache_implementation hidden_act",  # hidden_activation replaces the latter
    tensors=decoder(SANDWICH_NORMS, _norm),
)
_GEMMA3 = _GEMMA2.variant(
    "gemma3_text",
    "Gemma3",
    fixed={**_FIXED, "activation": "geglu_tanh", "qk_norm": True},
    rope=local_rope(1e6, 1e4, local_key="rope_local_base_freq"),
    columns=(windows(every_nth_full(6, *_PATTERN), default=4096),),
)
_GEMMA2.register(_GEMMA3)


# --- T5Gemma ----------------------------------------------------------------------------------------------------------

_SIDES = {"encoder": "source_vocab_size", "decoder": "target_vocab_size"}
_SHARED = [field.name for field in fields(ModelConfig)]
_OWN = ("layer_types", "window", "tie_output", "logits_softcap", "pad_id", "bos_id", "eos_id")  # may differ


def _read_sides(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of both sides, each of which has the keys of Gemma 2."""
    encoder, decoder = (_read_side(reader, side) for side in _SIDES)
    for name in _SHARED:
        if name not in _OWN and (value := getattr(encoder, name)) != getattr(decoder, name):
            received = f"an encoder with {name} {value!r} and a decoder with {getattr(decoder, name)!r}"
            raise CheckpointError(f"{reader.path} has {received}; expected the same")
    longer, shorter = (encoder, decoder) if encoder.num_layers > decoder.num_layers else (decoder, encoder)
    if any(longer.window_of(i) != shorter.window_of(i) for i in range(shorter.num_layers)):
        raise CheckpointError(f"{reader.path} has other windows in the encoder than in the decoder; expected the same")
    return {
        **{name: getattr(decoder, name) for name in _SHARED},
        "layer_types": longer.layer_types,
        "window": longer.window,
        "source_vocab_size": encoder.vocab_size,
        "target_vocab_size": decoder.vocab_size,
        "num_encoder_layers": encoder.num_layers,
        "num_decoder_layers": decoder.num_layers,
    }


def _read_side(reader: ConfigReader, side: str) -> LanguageModelConfig:
    """Return the configuration of the encoder or the decoder."""
    section = reader.section(side)
    section.values["tie_word_embeddings"] = True  # that of the whole model counts
    section.skip("is_decoder", "model_type")
    section.require("is_causal", side == "decoder")
    config = _GEMMA2.read_config(section)
    section.finish()
    return config


def _write_sides(config: TransformerConfig) -> dict[str, Any]:
    shared, sides = {name: getattr(config, name) for name in _SHARED}, {}
    for side, vocab_size in _SIDES.items():
        num_layers = getattr(config, f"num_{side}_layers")
        types = None if config.layer_types is None else config.layer_types[:num_layers]
        own = {"num_layers": num_layers, "layer_types": types, "vocab_size": getattr(config, vocab_size)}
        values = _GEMMA2.write_config(LanguageModelConfig(**{**shared, **own}))
        del values["architectures"]
        values["sliding_window"] = values["sliding_window"] or 4096  # transformers needs it even if no layer does
        sides[side] = {**values, "model_type": "t5_gemma_module", "is_decoder": side == "decoder"}
    return sides


def _read_output(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    return {"tie_output": read_tied(reader, "lm_head.out_proj.weight"), **read_decoder_ids(reader)}


def _stack(side: str) -> Tensors:
    """Return the layouts of one side, "encoder" or "decoder"."""
    theirs, ours = f"model.{side}.layers.{{i}}.", f"{side}.{{i}}."
    names = {"self_attn": "self_attention", "cross_attn": "cross_attention", "feedforward": "feed_forward"}
    tensors = {f"model.{side}.norm.weight": plus_one(f"{side}_norm.weight")}
    for name, part in names.items():
        tensors[f"{theirs}pre_{name}_layernorm.weight"] = plus_one(f"{ours}{part}_residual.norm.weight")
        tensors[f"{theirs}post_{name}_layernorm.weight"] = plus_one(f"{ours}{part}_residual.norm_after.weight")
        if name != "feedforward":
            tensors |= attention(theirs + name, ours + part, "q_proj k_proj v_proj o_proj")
    return tensors | feed_forward(theirs + "mlp", ours + "feed_forward")


Table(
    model_type="t5gemma",
    architecture="T5GemmaForConditionalGeneration",
    model=Transformer,
    columns=(Column(_read_sides, _write_sides), Column(_read_output, write_output)),
    skipped="vocab_size",
    written={"is_encoder_decoder": True, "vocab_size": lambda config: config.target_vocab_size},
    prefix="model.",
    tied={"lm_head.out_proj.weight": "model.decoder.embed_tokens.weight"},
    ignored=("*.rotary_emb.inv_freq",),
    tensors={
        "model.encoder.embed_tokens.weight": same("source_embedding.weight"),
        "model.decoder.embed_tokens.weight": same("target_embedding.weight"),
        **_stack("encoder"),
        **_stack("decoder"),
        "lm_head.out_proj.weight": transposed("output.weight"),
    },
).register()
