"""Language models with mixtures of experts: Mixtral, Qwen 2 and 3 MoE, and OLMoE.

Jiang et al. (2024); Qwen team (2024, 2025); Muennighoff et al. (2024).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import HEAD_DEFAULTS, HEADS, LAYER, OURS, RMS_SIZES, Decoder, decoder, register_decoders
from xformer.families.layouts import Layout, transposed
from xformer.families.values import read_no_window, read_window, read_windows, write_windows
from xformer.models import LanguageModelConfig


def _read_qwen(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of windows, which Qwen 2 has in every other layer up to max_window_layers; and dense layers."""
    layers = range(fields["num_layers"])
    types = ["sliding_attention"] * len(layers)
    if reader.model_type == "qwen2_moe":
        last = reader.count("max_window_layers", default=28, at_least=0)
        types = ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in layers]
    has_window = reader.flag("use_sliding_window", default=False)
    step = reader.count("decoder_sparse_step", default=1)
    without = reader.counts("mlp_only_layers", default=[], at_least=0)
    return {
        "dense_layers": tuple(i for i in layers if i in without or (i + 1) % step),
        **read_windows(reader, types, default_window=4096, has_window=has_window),
    }


def _write(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    if config.num_experts == 0:
        raise ConfigError("num_experts is 0; expected experts")
    model_type, d_ff, windows = values["model_type"], config.expert_d_ff or config.d_ff, write_windows(config)
    if model_type != "qwen2_moe":  # all layers have windows, or none has
        del windows["layer_types"]
    if model_type == "olmoe":
        return {**values, "intermediate_size": d_ff}
    if model_type == "mixtral":
        return {**values, **windows, "intermediate_size": d_ff}
    values |= {"moe_intermediate_size": d_ff, "decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    return {**values, **windows, "use_sliding_window": windows["sliding_window"] is not None}


_MIXTRAL = Decoder(
    architecture="MixtralForCausalLM",
    keys={
        **RMS_SIZES,
        **HEADS,
        "num_experts_per_token": "num_experts_per_tok",
        "num_experts": "num_local_experts num_experts",
    },
    defaults={
        **HEAD_DEFAULTS,
        "num_key_value_heads": 8,
        "max_positions": 2048,
        "norm_epsilon": 1e-5,
        "num_experts": 8,
        "num_experts_per_token": 2,
    },
    fixed={"norm": "rms", "attention_bias": False, "feed_forward_bias": False},
    theta=1e6,
    skipped="router_jitter_noise output_router_logits router_aux_loss_coef use_sliding_window max_window_layers",
    read=read_window,
    write=_write,
)
_OLMOE = replace(
    _MIXTRAL,
    architecture="OlmoeForCausalLM",
    keys={
        **_MIXTRAL.keys,
        "num_experts": "num_experts num_local_experts",
        "normalize_expert_weights": "norm_topk_prob",
        "attention_bias": "attention_bias",
    },
    defaults={
        **_MIXTRAL.defaults,
        **HEAD_DEFAULTS,
        "normalize_expert_weights": False,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_token": 8,
    },
    fixed={"norm": "rms", "feed_forward_bias": False, "qk_norm": True, "qk_norm_all_heads": True},
    theta=1e4,
    read=read_no_window,
)
_QWEN3 = replace(
    _OLMOE,
    architecture="Qwen3MoeForCausalLM",
    keys={**_OLMOE.keys, "expert_d_ff": "moe_intermediate_size"},
    defaults={
        **_OLMOE.defaults,
        "num_key_value_heads": 4,
        "norm_epsilon": 1e-6,
        "num_experts": 128,
        "expert_d_ff": 768,
    },
    fixed={"norm": "rms", "feed_forward_bias": False, "qk_norm": True},
    read=_read_qwen,
)
_QWEN2 = replace(
    _QWEN3,
    architecture="Qwen2MoeForCausalLM",
    keys={**_QWEN3.keys, "attention_bias": "qkv_bias", "shared_expert_d_ff": "shared_expert_intermediate_size"},
    defaults={
        **_QWEN3.defaults,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_token": 4,
        "expert_d_ff": 1408,
        "attention_bias": True,
        "shared_expert_d_ff": 5632,
    },
    fixed={"norm": "rms", "attention_output_bias": False, "feed_forward_bias": False},
)


def _type_of(config: LanguageModelConfig) -> str:
    """Return the model type with the norms and the shared expert of a configuration."""
    if config.qk_norm:
        return "olmoe" if config.qk_norm_all_heads else "qwen3_moe"
    return "qwen2_moe" if config.shared_expert_d_ff else "mixtral"


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    """Return the table of tensors; those of the experts have other names in Mixtral."""
    is_mixtral = _type_of(config) == "mixtral"
    layer, ours = LAYER + ("block_sparse_moe" if is_mixtral else "mlp"), OURS + "feed_forward."
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    table = {**decoder(), f"{layer}.gate.weight": transposed(f"{ours}router")}
    for name, part in zip(names, ("gate", "up", "down"), strict=True):
        table[f"{layer}.experts.{{e}}.{name}.weight"] = transposed(f"{ours}experts.{{e}}.{part}.weight")
        table[f"{layer}.shared_expert.{name}.weight"] = transposed(f"{ours}shared.{part}.weight")
    return {**table, f"{layer}.shared_expert_gate.weight": transposed(f"{ours}shared_gate")}


register_decoders(
    {"mixtral": _MIXTRAL, "qwen2_moe": _QWEN2, "qwen3_moe": _QWEN3, "olmoe": _OLMOE}, _tensors, type_of=_type_of
)
