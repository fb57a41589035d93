"""OLMo 2 and 3 (OLMo team, 2024 and 2025) and EXAONE 4 (LG AI Research, 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import HEAD_DEFAULTS, HEADS, RMS_SIZES, Decoder, decoder, register_decoders, with_windows
from xformer.families.values import (
    every_nth_full,
    read_local_theta,
    read_windows,
    read_windows_without_positions,
    write_local_rope,
    write_windows,
)
from xformer.models import LanguageModelConfig


def _read_olmo3(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of windows of OLMo 3; their layers have unscaled rotary positions."""
    windows = read_windows(reader, every_nth_full(fields["num_layers"], 4), default_window=4096)
    return {"rope_local_theta": read_local_theta(reader, default=5e5), **windows}


def _write_olmo3(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    del values["rope_theta"], values["rope_scaling"]
    return {**values, **write_local_rope(config), **write_windows(config)}


def _read_exaone4(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of windows of EXAONE 4; if there are any, other layers have no positions."""
    if reader.values.get("layer_types") is not None:
        reader.skip("sliding_window_pattern")
        pattern = fields["num_layers"]
    else:
        pattern = reader.count("sliding_window_pattern", default=4)
    layer_types = every_nth_full(fields["num_layers"], pattern)
    has_window = reader.values.get("sliding_window", 4096) is not None
    return read_windows_without_positions(reader, layer_types) if has_window else read_windows(reader, layer_types)


_OLMO2 = Decoder(
    architecture="Olmo2ForCausalLM",
    keys={**RMS_SIZES, **HEADS, "attention_bias": "attention_bias"},
    defaults={**HEAD_DEFAULTS, "max_positions": 2048, "norm_epsilon": 1e-5, "attention_bias": False},
    fixed={
        "norm": "rms",
        "norm_position": "output",
        "feed_forward_bias": False,
        "qk_norm": True,
        "qk_norm_all_heads": True,
    },
    theta=10000.0,
)
_TYPES = {
    "olmo2": _OLMO2,
    "olmo3": replace(_OLMO2, architecture="Olmo3ForCausalLM", theta=5e5, read=_read_olmo3, write=_write_olmo3),
    "exaone4": replace(
        _OLMO2,
        architecture="Exaone4ForCausalLM",
        fixed={**_OLMO2.fixed, "qk_norm_all_heads": False},
        read=_read_exaone4,
        write=with_windows,
    ),
}


def _type_of(config: LanguageModelConfig) -> str:
    if config.qk_norm and not config.qk_norm_all_heads:
        return "exaone4"
    return "olmo2" if write_windows(config)["sliding_window"] is None else "olmo3"


_NORMS = {
    "post_attention_layernorm": "self_attention_residual.norm",
    "post_feedforward_layernorm": "feed_forward_residual.norm",
}
register_decoders(_TYPES, decoder(_NORMS), type_of=_type_of)
