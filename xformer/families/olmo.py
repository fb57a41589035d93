"""OLMo 2 and 3 (OLMo team, 2024 and 2025) and EXAONE 4 (LG AI Research, 2025)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import RMS_SIZES, decoder, decoder_family
from xformer.families.values import (
    every_nth_full,
    read_fields,
    read_heads,
    read_rotary_decoder,
    read_windows,
    read_windows_without_positions,
    write_activation,
    write_fields,
    write_output,
    write_rope,
    write_windows,
)
from xformer.models import LanguageModelConfig

_FIELDS = {**RMS_SIZES, "attention_bias": "attention_bias"}
_ARCHITECTURES = {"olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "exaone4": "Exaone4ForCausalLM"}


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.skip("attention_dropout", "tie_word_embeddings")
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
    local = reader.section("rope_parameters").section("sliding_attention")
    local.choice("rope_type", known=("default",), default="default")
    return {
        "rope_local_theta": local.number("rope_theta", default=5e5),
        **read_windows(reader, every_nth_full(num_layers, 4), default_window=4096),
    }


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
    values = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        **write_fields(config, _FIELDS),
        "num_key_value_heads": config.num_key_value_heads or config.num_heads,
        "head_dim": config.features_per_head,
        "hidden_act": write_activation(config, gated=True),
        **write_output(config),
    }
    rope = write_rope(config)
    if model_type == "olmo2":
        return values | rope
    if model_type == "exaone4":
        return values | rope | windows
    local = {"rope_type": "default", "rope_theta": config.rope_local_theta or config.rope_theta}
    rope = {"full_attention": rope["rope_parameters"], "sliding_attention": local}
    return values | windows | {"rope_parameters": rope}


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
