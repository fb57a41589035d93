"""Nemotron and Minitron (Parmar et al., 2024; Muralidharan et al., 2024)."""

from __future__ import annotations

from xformer.families.decoder import decoder, simple_family
from xformer.families.layouts import Layout, plus_one, same
from xformer.families.values import SIZES


def _norm(tensor: str, parameter: str) -> dict[str, Layout]:
    """Return the layouts of a layer norm that multiplies by 1 + weight."""
    return {f"{tensor}.weight": plus_one(f"{parameter}.weight"), f"{tensor}.bias": same(f"{parameter}.bias")}


NEMOTRON = simple_family(
    "nemotron",
    "NemotronForCausalLM",
    {**SIZES, "norm_epsilon": "norm_eps", "attention_bias": "attention_bias", "feed_forward_bias": "mlp_bias"},
    tensors=decoder(norm=_norm, names="up_proj down_proj"),
    defaults={"max_positions": 4096, "norm_epsilon": 1e-5, "attention_bias": False, "feed_forward_bias": False},
    fixed={},
    activation="relu2",
    fraction=0.5,
)
