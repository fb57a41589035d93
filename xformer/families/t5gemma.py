"""T5Gemma (Zhang et al., 2025): encoder-decoders adapted from Gemma 2."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.gemma import GEMMA2
from xformer.families.layouts import Layout, attention, feed_forward, plus_one, same, transposed
from xformer.families.values import read_decoder_ids, read_tied, write_output
from xformer.models import LanguageModelConfig, ModelConfig, Transformer, TransformerConfig

_SIDES = {"encoder": "source_vocab_size", "decoder": "target_vocab_size"}
_SHARED = [field.name for field in fields(ModelConfig)]
_OWN = ("layer_types", "window", "tie_output", "logits_softcap", "pad_id", "bos_id", "eos_id")  # may differ


def _read_config(reader: ConfigReader) -> TransformerConfig:
    """Translate the config.json of T5Gemma, in which each side has the keys of Gemma 2."""
    reader.skip("vocab_size")
    encoder, decoder = (_read_side(reader, side) for side in _SIDES)
    for name in _SHARED:
        if name not in _OWN and (value := getattr(encoder, name)) != getattr(decoder, name):
            raise CheckpointError(
                f"{reader.path} has an encoder with {name} {value!r} and a decoder with {getattr(decoder, name)!r}; "
                "expected the same"
            )
    longer, shorter = (encoder, decoder) if encoder.num_layers > decoder.num_layers else (decoder, encoder)
    if any(longer.window_of(i) != shorter.window_of(i) for i in range(shorter.num_layers)):
        raise CheckpointError(f"{reader.path} has other windows in the encoder than in the decoder; expected the same")
    return TransformerConfig(
        **{
            **{name: getattr(decoder, name) for name in _SHARED},
            "layer_types": longer.layer_types,
            "window": longer.window,
            "source_vocab_size": encoder.vocab_size,
            "target_vocab_size": decoder.vocab_size,
            "num_encoder_layers": encoder.num_layers,
            "num_decoder_layers": decoder.num_layers,
            "tie_output": read_tied(reader, "lm_head.out_proj.weight"),
            **read_decoder_ids(reader),
        }
    )


def _read_side(reader: ConfigReader, side: str) -> LanguageModelConfig:
    """Return the configuration of the encoder or the decoder."""
    section = reader.section(side)
    section.values["tie_word_embeddings"] = True  # that of the whole model counts
    section.skip("is_decoder", "model_type")
    section.require("is_causal", side == "decoder")
    config = GEMMA2.read_config(section)
    section.finish()
    return config


def _write_config(config: TransformerConfig, model_type: str) -> dict[str, Any]:
    if config.share_embeddings:
        raise ConfigError("share_embeddings is true; t5gemma expects false")
    shared, sides = {name: getattr(config, name) for name in _SHARED}, {}
    for side, vocab_size in _SIDES.items():
        num_layers = getattr(config, f"num_{side}_layers")
        types = None if config.layer_types is None else config.layer_types[:num_layers]
        own = {"num_layers": num_layers, "layer_types": types, "vocab_size": getattr(config, vocab_size)}
        values = GEMMA2.write_config(LanguageModelConfig(**{**shared, **own}))
        del values["architectures"]
        values["sliding_window"] = values["sliding_window"] or 4096  # transformers needs it even if no layer does
        sides[side] = {**values, "model_type": "t5_gemma_module", "is_decoder": side == "decoder"}
    return {
        "architectures": ["T5GemmaForConditionalGeneration"],
        "model_type": model_type,
        "is_encoder_decoder": True,
        **sides,
        "vocab_size": config.target_vocab_size,
        **write_output(config),
    }


def _stack(side: str) -> dict[str, Layout]:
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


Family(
    model_types=("t5gemma",),
    model=Transformer,
    read_config=_read_config,
    write_config=_write_config,
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
