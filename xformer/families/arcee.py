"""AFM (Arcee, 2025): Llama with the squared ReLU in place of a gated activation."""

from __future__ import annotations

from xformer.families.decoder import RMS_SIZES, decoder, simple_family

ARCEE = simple_family(
    "arcee",
    "ArceeForCausalLM",
    {**RMS_SIZES, "attention_bias": "attention_bias", "feed_forward_bias": "mlp_bias"},
    tensors=decoder(),
    defaults={"max_positions": 4096, "norm_epsilon": 1e-5, "attention_bias": False, "feed_forward_bias": False},
    fixed={"norm": "rms"},
    activation="relu2",
)
