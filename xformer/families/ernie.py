"""ERNIE 4.5 without experts (Baidu, 2025): Llama with rotary positions of neighboring features."""

from __future__ import annotations

from xformer.families.decoder import RMS_SIZES, interleaved_decoder, simple_family

ERNIE = simple_family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    {**RMS_SIZES, "attention_bias": "use_bias", "feed_forward_bias": "use_bias", "head_dim": "head_dim"},
    tensors=interleaved_decoder,
    defaults={
        "max_positions": 131072,
        "norm_epsilon": 1e-5,
        "attention_bias": False,
        "feed_forward_bias": False,
        "head_dim": 128,
    },
    fixed={"norm": "rms"},
    theta=5e5,
    required={"compression_ratio": 1.0},
)
