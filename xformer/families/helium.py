"""Helium (Kyutai, 2025): Llama with interleaved rotary positions."""

from __future__ import annotations

from xformer.families.decoder import RMS_SIZES, interleaved_decoder, simple_family

HELIUM = simple_family(
    "helium",
    "HeliumForCausalLM",
    {**RMS_SIZES, "attention_bias": "attention_bias", "feed_forward_bias": "mlp_bias"},
    tensors=interleaved_decoder,
    defaults={"max_positions": 4096, "norm_epsilon": 1e-8, "attention_bias": False, "feed_forward_bias": False},
    fixed={"norm": "rms", "attention_output_bias": False},
    theta=1e5,
)
