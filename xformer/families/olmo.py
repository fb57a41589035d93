"""OLMo 2 and 3 (OLMo team, 2024 and 2025) and EXAONE 4 (LG AI Research, 2025)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import RMS_SIZES, decoder, decoder_family
from xformer.families.values import (
    every_nth_full,
    read_fields,
    read_heads,
    read_local_theta,
    read_rotary_decoder,
    read_windows,
    read_windows_without_positions,
    write_local_rope,
    write_rotary_decoder,
    write_windows,
)
from xformer.models import LanguageModelConfig

_FIELDS = {**RMS_SIZES, "attention_bias": "attention_bias"}
_ARCHITECTURES = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "exaone4": "Exaone4ForCausalLM"}


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.require("hidden_act", "silu", "swish")
    fields = read_fields(reader, _FIELDS, max_positions=2048, norm_epsilon=1e-5, attention_bias=False)
    windows: dict[str, Any] = {}
    if reader.model_type == "olmo3":
        windows = _read_olmo3(reader, fields["num_layers"])
    if reader.model_type == "exaone4":
        windows = _read_exaone4(reader, fields["num_layers"])
    return LanguageModelConfig(
        **fields,
        **read_heads(reader, fields),
        activation="swiglu",
        norm="rms",
        norm_position="output",
        qk_norm=True,
        qk_norm_all_heads=reader.model_type != "exaone4",
        feed_forward_bias=False,
        **windows,
        **read_rotary_decoder(reader, theta=5e5 if reader.model_type == "olmo3" else 1e4),
    )


def _read_olmo3(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of windows of OLMo 3; their layers have unscaled rotary positions."""
    windows = read_windows(reader, every_nth_full(num_layers, 4), default_window=4096)
    return {"rope_local_theta": read_local_theta(reader, default=5e5), **windows}


def _read_exaone4(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of windows of EXAONE 4; if there are any, other layers have no positions."""
    if reader.values.get("layer_types") is not None:
        reader.skip("sliding_window_pattern")
        pattern = num_layers
    else:
        pattern = reader.count("sliding_window_pattern", default=4)
    layer_types = every_nth_full(num_layers, pattern)
    has_window = reader.values.get("sliding_window", 4096) is not None
    return read_windows_without_positions(reader, layer_types) if has_window else read_windows(reader, layer_types)


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of OLMo 2, OLMo 3 if it has windows, or EXAONE 4."""
    windows = write_windows(config)
    if config.qk_norm and not config.qk_norm_all_heads:
        model_type = "exaone4"
    else:
        model_type = "olmo2" if windows["sliding_window"] is None else "olmo3"
    values = write_rotary_decoder(config, model_type, _ARCHITECTURES[model_type], _FIELDS, gated=True)
    if model_type == "olmo3":
        del values["rope_theta"], values["rope_scaling"]
        values |= write_local_rope(config)
    return values if model_type == "olmo2" else values | windows


OLMO = decoder_family(
    model_types=tuple(_ARCHITECTURES),
    read_config=_read_config,
    write_config=_write_config,
    tensors=decoder(
        {
            "post_attention_layernorm": "self_attention_residual.norm",
            "post_feedforward_layernorm": "feed_forward_residual.norm",
        }
    ),
)
