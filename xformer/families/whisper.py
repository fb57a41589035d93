"""Whisper (Radford et al., 2023)."""

from __future__ import annotations

from typing import Any

from xformer.families.bart import stack
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, linear, same, transposed
from xformer.families.values import read_activation, read_decoder_ids, write_activation
from xformer.models import SpeechTransformer, SpeechTransformerConfig


def read_config(reader: ConfigReader) -> SpeechTransformerConfig:
    """Translate the config.json of Whisper."""
    reader.skip("dropout", "attention_dropout", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop")
    reader.skip("num_hidden_layers", "classifier_proj_size", "median_filter_width", "tie_word_embeddings")
    reader.skip("scale_embedding")  # transformers does not use it
    reader.skip("apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks")  # training only
    reader.skip("mask_feature_prob", "mask_feature_length", "mask_feature_min_masks")
    reader.skip("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids")  # generation only
    reader.require("use_weighted_layer_sum", False)
    num_heads, d_ff = reader.count("encoder_attention_heads"), reader.count("encoder_ffn_dim")
    reader.require("decoder_attention_heads", num_heads)
    reader.require("decoder_ffn_dim", d_ff)
    return SpeechTransformerConfig(
        source_vocab_size=reader.count("num_mel_bins", default=80),
        target_vocab_size=reader.count("vocab_size"),
        num_encoder_layers=reader.count("encoder_layers"),
        num_decoder_layers=reader.count("decoder_layers"),
        d_model=reader.count("d_model"),
        num_heads=num_heads,
        d_ff=d_ff,
        activation=read_activation(reader, "activation_function", default="gelu"),
        key_bias=False,
        positions="learned",
        max_source_positions=reader.count("max_source_positions", default=1500),
        max_positions=reader.count("max_target_positions", default=448),
        scale_embeddings=False,
        dropout=0.0,
        tie_output="proj_out.weight" in reader.tied,
        **read_decoder_ids(reader),
    )


def write_config(config: SpeechTransformerConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of Whisper."""
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": config.target_vocab_size,
        "num_mel_bins": config.source_vocab_size,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "d_model": config.d_model,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.d_ff,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": write_activation(config),
        "max_source_positions": config.max_source_positions,
        "max_target_positions": config.max_positions,
        "tie_word_embeddings": config.tie_output,
        "pad_token_id": config.pad_id,
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.bos_id,
        "begin_suppress_tokens": None,
    }


def _tensors() -> dict[str, Layout]:
    tensors = {
        "model.decoder.embed_tokens.weight": same("target_embedding.weight"),
        "proj_out.weight": transposed("output.weight"),
        **stack("encoder"),
        **stack("decoder"),
    }
    for side in ("encoder", "decoder"):  # in contrast to BART, all rows are positions
        tensors[f"model.{side}.embed_positions.weight"] = same(f"{side}_input.positions.weight")
    for layer in ("conv1", "conv2"):
        tensors |= linear(f"model.encoder.{layer}", f"source_embedding.{layer}")
    return tensors


WHISPER = register(
    Family(
        model_types=("whisper",),
        model=SpeechTransformer,
        read_config=read_config,
        write_config=write_config,
        prefix="model.",
        tied={"proj_out.weight": "model.decoder.embed_tokens.weight"},
        tensors=_tensors(),
    )
)
