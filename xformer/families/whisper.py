"""Whisper (Radford et al., 2023)."""

from __future__ import annotations

from typing import Any

from xformer.families.bart import read_shared, stack, write_shared
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import Layout, linear, same, transposed
from xformer.families.values import read_tied
from xformer.models import SpeechTransformer, SpeechTransformerConfig


def _read_config(reader: ConfigReader) -> SpeechTransformerConfig:
    reader.skip("classifier_proj_size", "median_filter_width")
    reader.skip("scale_embedding")  # transformers does not use it
    reader.skip("apply_spec_augment", "mask_time_prob", "mask_time_length", "mask_time_min_masks")  # training only
    reader.skip("mask_feature_prob", "mask_feature_length", "mask_feature_min_masks")
    reader.skip("suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids")  # generation only
    reader.require("use_weighted_layer_sum", False)
    return SpeechTransformerConfig(
        source_vocab_size=reader.count("num_mel_bins", default=80),
        target_vocab_size=reader.count("vocab_size"),
        key_bias=False,
        positions="learned",
        max_source_positions=reader.count("max_source_positions", default=1500),
        max_positions=reader.count("max_target_positions", default=448),
        scale_embeddings=False,
        tie_output=read_tied(reader, "proj_out.weight"),
        **read_shared(reader),
    )


def _write_config(config: SpeechTransformerConfig) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        **write_shared(config),
        "vocab_size": config.target_vocab_size,
        "num_mel_bins": config.source_vocab_size,
        "max_source_positions": config.max_source_positions,
        "max_target_positions": config.max_positions,
        "bos_token_id": config.bos_id,
        "begin_suppress_tokens": None,
    }


def _tensors() -> dict[str, Layout]:
    tensors = {
        "model.decoder.embed_tokens.weight": same("target_embedding.weight"),
        "proj_out.weight": transposed("output.weight"),
        **stack("encoder"),
        **stack("decoder"),
    }
    for layer in ("conv1", "conv2"):
        tensors |= linear(f"model.encoder.{layer}", f"source_embedding.{layer}")
    return tensors


Family(
    model_types=("whisper",),
    model=SpeechTransformer,
    read_config=_read_config,
    write_config=_write_config,
    prefix="model.",
    tied={"proj_out.weight": "model.decoder.embed_tokens.weight"},
    tensors=_tensors(),
).register()
