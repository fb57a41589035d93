"""Gemma 2 and the text models of Gemma 3 (Gemma team, 2024 and 2025)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import (
    HEADS,
    RMS_SIZES,
    SANDWICH_NORMS,
    Decoder,
    decoder,
    register_decoders,
    without_older_rope,
)
from xformer.families.layouts import Layout, plus_one
from xformer.families.values import (
    every_nth_full,
    read_activation,
    read_local_theta,
    read_windows,
    write_local_rope,
    write_windows,
)
from xformer.models import LanguageModelConfig

_SOFTCAPS = {"attention_softcap": "attn_logit_softcapping", "logits_softcap": "final_logit_softcapping"}


def _read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    activation = read_activation(reader, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    if activation != "gelu_tanh":
        raise CheckpointError(f"{reader.path} has the activation {activation!r}; expected 'gelu_pytorch_tanh'")
    reader.skip("hidden_act")  # hidden_activation replaces it
    is_gemma3 = reader.model_type == "gemma3_text"
    pattern = reader.count("sliding_window_pattern", "_sliding_window_pattern", default=6 if is_gemma3 else 2)
    local_theta = read_local_theta(reader, default=reader.number("rope_local_base_freq", default=10000.0))
    return {
        "scale_embeddings": True,
        "attention_scale": reader.number("query_pre_attn_scalar", default=256) ** -0.5,
        **{field: reader.number(key, default=None) for field, key in _SOFTCAPS.items()},
        "rope_local_theta": local_theta if is_gemma3 else None,
        **read_windows(reader, every_nth_full(fields["num_layers"], pattern), default_window=4096),
    }


def _write(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    scale = config.attention_scale or config.features_per_head**-0.5
    scalar = round(scale**-2)  # transformers expects an integer
    if abs(scale**-2 - scalar) > 1e-6 * scalar:
        raise ConfigError(f"attention_scale is {scale}; expected 1 / sqrt(n) with an integer n")
    return {
        **without_older_rope(values),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        **{key: getattr(config, field) for field, key in _SOFTCAPS.items()},
        **(write_local_rope(config) if config.qk_norm else {}),
        **write_windows(config),
    }


def _norm(tensor: str, parameter: str) -> dict[str, Layout]:
    return {f"{tensor}.weight": plus_one(f"{parameter}.weight")}


GEMMA2 = Decoder(
    architecture="Gemma2ForCausalLM",
    keys={**RMS_SIZES, **HEADS, "attention_bias": "attention_bias"},
    defaults={"max_positions": 8192, "norm_epsilon": 1e-6, "attention_bias": False, "head_dim": 256},
    fixed={"activation": "geglu_tanh", "norm": "rms", "norm_position": "sandwich", "feed_forward_bias": False},
    activation=None,
    theta=1e4,
    required={"use_bidirectional_attention": False},
    skipped="cache_implementation",
    read=_read,
    write=_write,
)
_GEMMA3 = replace(GEMMA2, architecture="Gemma3ForCausalLM", fixed={**GEMMA2.fixed, "qk_norm": True}, theta=1e6)
register_decoders(
    {"gemma2": GEMMA2, "gemma3_text": _GEMMA3},
    decoder(SANDWICH_NORMS, _norm),
    type_of=lambda config: "gemma3_text" if config.qk_norm else "gemma2",
)
