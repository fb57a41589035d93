"""Gemma 2 and the text models of Gemma 3 (Gemma team, 2024 and 2025)."""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import REQUIRED, ConfigReader
from xformer.families.decoder import SANDWICH_NORMS, Decoder, decoder, register_decoders
from xformer.families.layouts import Layout, plus_one
from xformer.families.table import Column, Key
from xformer.families.values import every_nth_full, heads, local_rope, read_activation, sizes, windows, write_rope
from xformer.models import LanguageModelConfig


def _read_activation(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    activation = read_activation(reader, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
    if activation != "gelu_tanh":
        raise CheckpointError(f"{reader.path} has the activation {activation!r}; expected 'gelu_pytorch_tanh'")
    return {"activation": "geglu_tanh"}


def _query_scalar(config: LanguageModelConfig) -> int:
    scale = config.attention_scale or config.features_per_head**-0.5
    scalar = round(scale**-2)  # transformers expects an integer
    if abs(scale**-2 - scalar) > 1e-6 * scalar:
        raise ConfigError(f"attention_scale is {scale}; expected 1 / sqrt(n) with an integer n")
    return scalar


def _norm(tensor: str, parameter: str) -> dict[str, Layout]:
    return {f"{tensor}.weight": plus_one(f"{parameter}.weight")}


_LOCAL_ROPE = local_rope(1e4, 1e4, local_key="rope_local_base_freq")
_FIXED = {"norm": "rms", "norm_position": "sandwich", "feed_forward_bias": False, "scale_embeddings": True}
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
GEMMA2 = Decoder(
    model_type="gemma2",
    architecture="Gemma2",
    keys={
        **sizes("rms_norm_eps", 1e-6, 8192),
        **heads(REQUIRED, 256),
        "attention_bias": Key("attention_bias", False),
        "attention_scale": Key("query_pre_attn_scalar", 256.0, read=lambda x: x**-0.5, write=_query_scalar),
        "attention_softcap": Key("attn_logit_softcapping", None, float),
        "logits_softcap": Key("final_logit_softcapping", None, float),
    },
    fixed={**_FIXED, "rope_local_theta": None},
    activation=Column(_read_activation, lambda config: {"hidden_activation": "gelu_pytorch_tanh"}),
    rope=Column(_LOCAL_ROPE.read, lambda config: {"rope_parameters": write_rope(config)["rope_parameters"]}),
    columns=(windows(every_nth_full(2, *_PATTERN), default=4096),),
    required={"use_bidirectional_attention": False},
    skipped="cache_implementation hidden_act",  # hidden_activation replaces the latter
)
_GEMMA3 = GEMMA2.variant(
    "gemma3_text",
    "Gemma3",
    fixed={**_FIXED, "qk_norm": True},
    rope=local_rope(1e6, 1e4, local_key="rope_local_base_freq"),
    columns=(windows(every_nth_full(6, *_PATTERN), default=4096),),
)
register_decoders(GEMMA2, _GEMMA3, tensors=decoder(SANDWICH_NORMS, _norm))
