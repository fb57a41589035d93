"""Llama and similar language models: Mistral, Ministral, Qwen 2 and 3, Phi 3, Seed-OSS, SmolLM 3 and Granite.

Touvron et al. (2023); Jiang et al. (2023); Qwen team (2024, 2025); Abdin et al. (2024); ByteDance Seed team (2025);
Bakouch et al. (2025); Granite team (2024).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import LAYER, OURS, RMS_SIZES, decoder, decoder_family, embedding_and_norms
from xformer.families.layouts import fused, linear
from xformer.families.values import (
    read_fields,
    read_rotary_decoder,
    read_windows,
    write_fields,
    write_rotary_decoder,
    write_windows,
)
from xformer.models import LanguageModelConfig

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "ministral": "MinistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
}

_WITH_FEED_FORWARD_BIAS = ("llama", "seed_oss", "smollm3", "granite")
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
}


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.skip("auto_map", "max_window_layers")
    reader.skip("use_sliding_window")
    reader.require("hidden_act", "silu", "swish")
    epsilon = 1e-5 if reader.model_type == "phi3" else 1e-6
    fields = read_fields(reader, RMS_SIZES, max_positions=2048, norm_epsilon=epsilon)
    num_heads = fields["num_heads"]
    head_dim = 128 if reader.model_type in ("qwen3", "seed_oss") else fields["d_model"] // num_heads
    has_bias = reader.flag("attention_bias", default=reader.model_type in ("qwen2", "seed_oss"))
    has_output_bias = False if reader.model_type == "qwen2" else has_bias
    if reader.model_type == "seed_oss":
        has_output_bias = reader.flag("attention_out_bias", default=False)
    return LanguageModelConfig(
        **fields,
        num_key_value_heads=reader.count("num_key_value_heads", default=num_heads),
        head_dim=reader.count("head_dim", default=head_dim),
        activation="swiglu",
        norm="rms",
        qk_norm=reader.model_type == "qwen3",
        attention_bias=has_bias,
        attention_output_bias=has_output_bias,
        feed_forward_bias=reader.flag("mlp_bias", default=False),
        **(_read_smollm3 if reader.model_type == "smollm3" else _read_windows)(reader, fields["num_layers"]),
        **read_rotary_decoder(
            reader,
            theta=2e6 if reader.model_type == "smollm3" else 1e4,
            fraction=1.0 if reader.model_type == "phi3" else None,
        ),
        **(_read_scales(reader) if reader.model_type == "granite" else {}),
    )


def _read_scales(reader: ConfigReader) -> dict[str, Any]:
    """Return the factors of Granite."""
    fields = {field: reader.number(key, default=1.0) for field, key in _SCALES.items()}
    return {**fields, "logits_scale": 1.0 / reader.number("logits_scaling", default=1.0)}


def _read_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of windows: Qwen has them from layer max_window_layers on, the others in all layers."""
    model_type = reader.model_type
    is_qwen, is_mistral = model_type.startswith("qwen"), model_type in ("mistral", "ministral")
    first = reader.count("max_window_layers", default=28, at_least=0) if is_qwen else 0
    has_window = reader.flag("use_sliding_window", default=False) if is_qwen else is_mistral or model_type == "phi3"
    return read_windows(
        reader,
        ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)],
        default_window=4096 if is_qwen or is_mistral else None,
        has_window=has_window,
    )


def _read_smollm3(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of the layers of SmolLM 3 without rotary positions, which may have windows."""
    interval = reader.count("no_rope_layer_interval", default=4)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    has_rope = reader.counts("no_rope_layers", default=default, at_least=0)[:num_layers]  # the key means the opposite
    if len(has_rope) != num_layers:
        raise CheckpointError(
            f"{reader.path} has {len(has_rope)} no_rope_layers; expected one for each of {num_layers} layers"
        )
    layer_types = ["full_attention" if each else "sliding_attention" for each in has_rope]
    windows = read_windows(reader, layer_types, has_window=reader.flag("use_sliding_window", default=False))
    return {"layers_without_positions": [i for i, each in enumerate(has_rope) if not each], **windows}


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into a config.json of one of these models, but not of Phi 3."""
    model_type = _model_type(config)
    values = write_rotary_decoder(config, model_type, _ARCHITECTURES[model_type], RMS_SIZES, gated=True)
    if model_type in ("qwen3", *_WITH_FEED_FORWARD_BIAS):
        values["attention_bias"] = config.attention_bias
    if model_type in _WITH_FEED_FORWARD_BIAS:
        values["mlp_bias"] = config.feed_forward_bias
    if model_type == "seed_oss":
        values["attention_out_bias"] = config.attention_output_bias
    if model_type == "granite":
        values |= {**write_fields(config, _SCALES), "logits_scaling": 1.0 / config.logits_scale}
        values["attention_multiplier"] = config.attention_scale or config.features_per_head**-0.5
    windows = write_windows(config)
    layer_types = windows["layer_types"]
    if model_type.startswith("qwen"):  # before transformers 4.53, layer_types was not known
        first = [*layer_types, "sliding_attention"].index("sliding_attention")
        windows |= {"use_sliding_window": windows["sliding_window"] is not None, "max_window_layers": first}
    if model_type == "smollm3":
        without = config.layers_without_positions
        windows["no_rope_layers"] = [int(layer not in without) for layer in range(config.num_layers)]
        windows["use_sliding_window"] = windows["sliding_window"] is not None
    if model_type == "mistral":
        del windows["layer_types"]
    return values if model_type in ("llama", "seed_oss", "granite") else values | windows


def _has_scales(config: LanguageModelConfig) -> bool:
    """Return whether a configuration has factors that only Granite has."""
    head_scale = config.features_per_head**-0.5
    scales = config.embedding_scale, config.residual_scale, config.logits_scale
    return scales != (1.0, 1.0, 1.0) or (config.attention_scale or head_scale) != head_scale


def _model_type(config: LanguageModelConfig) -> str:
    """Return the model type with the norms, biases and window of a configuration."""
    bias, output_bias = config.attention_bias, config.attention_output_bias
    output_bias = bias if output_bias is None else output_bias
    if config.qk_norm:
        model_type = "qwen3"
    elif _has_scales(config):
        model_type = "granite"
    elif config.layers_without_positions:
        model_type = "smollm3"
    elif bias and not output_bias and not config.feed_forward_bias:
        model_type = "qwen2"
    elif bias != output_bias:
        model_type = "seed_oss"
    else:
        windows = {config.window_of(layer) for layer in range(config.num_layers)}
        model_type = "llama" if windows <= {None} else "ministral" if None in windows else "mistral"
    if model_type not in _WITH_FEED_FORWARD_BIAS and config.feed_forward_bias:
        raise ConfigError(f"feed_forward_bias is True; {model_type} expects False")
    if model_type not in ("qwen2", "seed_oss") and output_bias != bias:
        raise ConfigError(f"attention_output_bias is {output_bias}; {model_type} expects {bias}")
    if model_type in ("mistral", "ministral") and bias:
        raise ConfigError(f"attention_bias is True; {model_type} expects False")
    return model_type


def write_phi3_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of Phi 3 or Phi 4 mini."""
    scaling = config.rope_scaling or {"rope_type": "longrope"}
    if scaling["rope_type"] != "longrope":
        raise ConfigError(f"rope_scaling has rope_type {scaling['rope_type']!r}; phi3 expects 'longrope'")
    return {
        **write_rotary_decoder(config, "phi3", "Phi3ForCausalLM", RMS_SIZES, gated=True, writes_fraction=True),
        "original_max_position_embeddings": scaling.get("original_max_position_embeddings", config.max_positions),
        "sliding_window": write_windows(config)["sliding_window"],  # of all layers
    }


LLAMA = decoder_family(
    model_types=tuple(_ARCHITECTURES), read_config=_read_config, write_config=_write_config, tensors=decoder()
)

PHI3 = decoder_family(
    model_types=("phi3",),
    read_config=_read_config,
    write_config=write_phi3_config,
    tensors={
        **embedding_and_norms(),
        **linear(LAYER + "self_attn.o_proj", OURS + "self_attention.output"),
        **linear(LAYER + "mlp.down_proj", OURS + "feed_forward.down"),
        LAYER + "self_attn.qkv_proj.weight": fused(
            *(f"{OURS}self_attention.{part}.weight" for part in ("query", "key", "value")), transpose=True
        ),
        LAYER + "mlp.gate_up_proj.weight": fused(
            *(f"{OURS}feed_forward.{part}.weight" for part in ("gate", "up")), transpose=True
        ),
    },
)
