"""gpt-oss (OpenAI, 2025): experts with biases, attention sinks, and windows in every other layer."""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import LAYER, OURS, RMS_SIZES, decoder, decoder_family
from xformer.families.layouts import Layout, same, stacked_experts, transposed
from xformer.families.values import read_fields, read_rotary_decoder, read_windows, write_rotary_decoder, write_windows
from xformer.models import LanguageModelConfig

_FIELDS = {
    **RMS_SIZES,
    "num_experts": "num_local_experts num_experts",
    "num_experts_per_token": "num_experts_per_tok experts_per_token",
    "attention_bias": "attention_bias",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as in ClampedFeedForward


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.skip("output_router_logits", "router_aux_loss_coef", "initial_context_length")
    reader.require("hidden_act", "silu", "swish")
    for key, value in _CLAMPED.items():
        reader.require(key, value)
    if not reader.values.get("rope_parameters") and not reader.values.get("rope_scaling"):
        raise CheckpointError(f"{reader.path} has no key 'rope_parameters'")
    fields = read_fields(
        reader, _FIELDS, max_positions=2048, norm_epsilon=1e-5, num_experts=128, num_experts_per_token=4,
        attention_bias=True, num_key_value_heads=8, head_dim=64,
    )  # fmt: skip
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(fields["num_layers"])]
    return LanguageModelConfig(
        **fields,
        activation="swiglu_clamped",
        norm="rms",
        attention_sinks=True,
        router_bias=True,
        **read_windows(reader, types, default_window=128),
        **read_rotary_decoder(reader, theta=150000.0),
    )


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    if config.num_experts == 0:
        raise ConfigError("num_experts is 0; expected experts")
    return {
        **write_rotary_decoder(config, "gpt_oss", "GptOssForCausalLM", _FIELDS, gated=True),
        "intermediate_size": config.expert_d_ff or config.d_ff,
        **_CLAMPED,
        **write_windows(config),
    }


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


GPT_OSS = decoder_family(
    model_types=("gpt_oss",), read_config=_read_config, write_config=_write_config, tensors=_tensors
)
