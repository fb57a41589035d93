"""Language models with mixtures of experts: Mixtral, Qwen 2 and 3 MoE, and OLMoE.

Jiang et al. (2024); Qwen team (2024, 2025); Muennighoff et al. (2024).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import LAYER, OURS, RMS_SIZES, decoder, decoder_family
from xformer.families.layouts import Layout, transposed
from xformer.families.values import read_fields, read_rotary_decoder, read_windows, write_rotary_decoder, write_windows
from xformer.models import LanguageModelConfig

_ARCHITECTURES = {
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
}
_FIELDS = {**RMS_SIZES, "num_experts_per_token": "num_experts_per_tok"}
_OLMOE_FIELDS = {
    **_FIELDS,
    "num_experts": "num_experts num_local_experts",
    "normalize_expert_weights": "norm_topk_prob",
    "attention_bias": "attention_bias",
}
_QWEN3_FIELDS = {**_OLMOE_FIELDS, "expert_d_ff": "moe_intermediate_size"}
_QWEN2_FIELDS = {
    **_QWEN3_FIELDS,
    "attention_bias": "qkv_bias",
    "shared_expert_d_ff": "shared_expert_intermediate_size",
}
_KEYS = {
    "mixtral": {**_FIELDS, "num_experts": "num_local_experts num_experts"},
    "qwen2_moe": _QWEN2_FIELDS,
    "qwen3_moe": _QWEN3_FIELDS,
    "olmoe": _OLMOE_FIELDS,
}
_FLAGS = {"normalize_expert_weights": False, "attention_bias": False}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_experts": 8, "num_experts_per_token": 2, "norm_epsilon": 1e-5},
    "qwen2_moe": {
        **_FLAGS, "num_experts": 60, "num_experts_per_token": 4, "norm_epsilon": 1e-6, "expert_d_ff": 1408,
        "attention_bias": True, "shared_expert_d_ff": 5632,
    },
    "qwen3_moe": {
        **_FLAGS, "num_experts": 128, "num_experts_per_token": 8, "norm_epsilon": 1e-6, "expert_d_ff": 768,
    },
    "olmoe": {**_FLAGS, "num_experts": 64, "num_experts_per_token": 8, "norm_epsilon": 1e-5},
}  # fmt: skip
_KEY_VALUE_HEADS = {"mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4}


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.skip("router_jitter_noise", "output_router_logits", "router_aux_loss_coef")
    reader.skip("use_sliding_window", "max_window_layers")
    reader.require("hidden_act", "silu", "swish")
    model_type = reader.model_type
    fields = read_fields(reader, _KEYS[model_type], max_positions=2048, **_DEFAULTS[model_type])
    num_layers, num_heads = fields["num_layers"], fields["num_heads"]
    is_qwen = model_type.startswith("qwen")
    return LanguageModelConfig(
        **{"attention_bias": False, **fields},
        num_key_value_heads=reader.count("num_key_value_heads", default=_KEY_VALUE_HEADS.get(model_type, num_heads)),
        head_dim=reader.count("head_dim", default=fields["d_model"] // num_heads),
        attention_output_bias=False if model_type == "qwen2_moe" else None,
        dense_layers=_read_dense_layers(reader, num_layers) if is_qwen else (),
        activation="swiglu",
        norm="rms",
        qk_norm=model_type in ("qwen3_moe", "olmoe"),
        qk_norm_all_heads=model_type == "olmoe",
        feed_forward_bias=False,
        **_WINDOWS[model_type](reader, num_layers),
        **read_rotary_decoder(reader, theta=1e6 if model_type == "mixtral" else 1e4),
    )


def _read_mixtral_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of windows: all layers have one if sliding_window is given."""
    return read_windows(reader, ["sliding_attention"] * num_layers)


def _read_qwen2_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of windows: every other layer has one, up to max_window_layers."""
    last = reader.count("max_window_layers", default=28, at_least=0)
    types = ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(num_layers)]
    return _read_qwen_windows(reader, types)


def _read_qwen3_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of windows: all layers have one if use_sliding_window is true."""
    return _read_qwen_windows(reader, ["sliding_attention"] * num_layers)


def _read_qwen_windows(reader: ConfigReader, types: list[str]) -> dict[str, Any]:
    has_window = reader.flag("use_sliding_window", default=False)
    return read_windows(reader, types, default_window=4096, has_window=has_window)


def _read_no_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of windows: no layer has one."""
    return read_windows(reader, ["full_attention"] * num_layers, has_window=False)


_WINDOWS = {
    "mixtral": _read_mixtral_windows,
    "qwen2_moe": _read_qwen2_windows,
    "qwen3_moe": _read_qwen3_windows,
    "olmoe": _read_no_windows,
}


def _read_dense_layers(reader: ConfigReader, num_layers: int) -> tuple[int, ...]:
    """Return the indices of the layers without experts."""
    step = reader.count("decoder_sparse_step", default=1)
    without = reader.counts("mlp_only_layers", default=[], at_least=0)
    return tuple(i for i in range(num_layers) if i in without or (i + 1) % step)


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    if config.num_experts == 0:
        raise ConfigError("num_experts is 0; expected experts")
    model_type = _model_type(config)
    values = write_rotary_decoder(config, model_type, _ARCHITECTURES[model_type], _KEYS[model_type], gated=True)
    d_ff, windows = config.expert_d_ff or config.d_ff, write_windows(config)
    if model_type != "qwen2_moe":  # all layers have windows, or none has
        del windows["layer_types"]
    if model_type == "olmoe":
        return values | {"intermediate_size": d_ff}
    if model_type == "mixtral":
        return values | windows | {"intermediate_size": d_ff}
    values |= {"moe_intermediate_size": d_ff, "decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
    return values | windows | {"use_sliding_window": windows["sliding_window"] is not None}


def _model_type(config: LanguageModelConfig) -> str:
    """Return the model type with the norms and the shared expert of a configuration."""
    if config.qk_norm:
        return "olmoe" if config.qk_norm_all_heads else "qwen3_moe"
    return "qwen2_moe" if config.shared_expert_d_ff else "mixtral"


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    """Return the table of tensors; those of the experts have other names in Mixtral."""
    is_mixtral = _model_type(config) == "mixtral"
    layer, ours = LAYER + ("block_sparse_moe" if is_mixtral else "mlp"), OURS + "feed_forward."
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    table = {**decoder(), f"{layer}.gate.weight": transposed(f"{ours}router")}
    for name, part in zip(names, ("gate", "up", "down"), strict=True):
        table[f"{layer}.experts.{{e}}.{name}.weight"] = transposed(f"{ours}experts.{{e}}.{part}.weight")
        table[f"{layer}.shared_expert.{name}.weight"] = transposed(f"{ours}shared.{part}.weight")
    return {**table, f"{layer}.shared_expert_gate.weight": transposed(f"{ours}shared_gate")}


MIXTRAL = decoder_family(
    model_types=tuple(_ARCHITECTURES), read_config=_read_config, write_config=_write_config, tensors=_tensors
)
