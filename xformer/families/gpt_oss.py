"""gpt-oss (OpenAI, 2025): experts with biases, attention sinks, and windows in every other layer."""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import HEADS, LAYER, OURS, RMS_SIZES, Decoder, decoder, register_decoders
from xformer.families.layouts import Layout, same, stacked_experts, transposed
from xformer.families.values import read_windows, write_windows
from xformer.models import LanguageModelConfig

_CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as in ClampedFeedForward


def _read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    if not reader.values.get("rope_parameters") and not reader.values.get("rope_scaling"):
        raise CheckpointError(f"{reader.path} has no key 'rope_parameters'")
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])]
    return read_windows(reader, types, default_window=128)


def _write(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    if config.num_experts == 0:
        raise ConfigError("num_experts is 0; expected experts")
    return {**values, "intermediate_size": config.expert_d_ff or config.d_ff, **write_windows(config)}


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    """Return the table of tensors; one has the weights of all experts."""
    table = {
        **decoder(),
        f"{LAYER}self_attn.sinks": same(f"{OURS}self_attention.sinks"),
        f"{LAYER}mlp.router.weight": transposed(f"{OURS}feed_forward.router"),
        f"{LAYER}mlp.router.bias": same(f"{OURS}feed_forward.router_bias"),
    }
    expert = f"{OURS}feed_forward.experts.{{e}}."
    for name, parts in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
        for suffix, kind in {"": "weight", "_bias": "bias"}.items():
            parameters = [f"{expert}{part}.{kind}" for part in parts]
            table[f"{LAYER}mlp.experts.{name}{suffix}"] = stacked_experts(config.num_experts, *parameters)
    return table


register_decoders(
    {
        "gpt_oss": Decoder(
            architecture="GptOssForCausalLM",
            keys={
                **RMS_SIZES,
                **HEADS,
                "num_experts": "num_local_experts num_experts",
                "num_experts_per_token": "num_experts_per_tok experts_per_token",
                "attention_bias": "attention_bias",
            },
            defaults={
                "max_positions": 2048,
                "norm_epsilon": 1e-5,
                "num_experts": 128,
                "num_experts_per_token": 4,
                "attention_bias": True,
                "num_key_value_heads": 8,
                "head_dim": 64,
            },
            fixed={"norm": "rms", "attention_sinks": True, "router_bias": True},
            activation="swiglu_clamped",
            theta=150000.0,
            required=_CLAMPED,
            skipped="output_router_logits router_aux_loss_coef initial_context_length",
            written=_CLAMPED,
            read=_read,
            write=_write,
        )
    },
    _tensors,
)
