"""GLM 4 (model types `glm` and `glm4`; GLM team, 2024 and 2025)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import LAYER, OURS, RMS_SIZES, decoder_family, embedding_and_norms
from xformer.families.layouts import Layout, attention, fused, transposed
from xformer.families.values import read_fields, read_rotary_decoder, write_rotary_decoder
from xformer.models import LanguageModelConfig

_FIELDS = {**RMS_SIZES, "attention_bias": "attention_bias"}
_NORMS = {
    "input_layernorm": "self_attention_residual.norm",
    "post_self_attn_layernorm": "self_attention_residual.norm_after",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "post_mlp_layernorm": "feed_forward_residual.norm_after",
}


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.require("hidden_act", "silu", "swish")
    return LanguageModelConfig(
        **read_fields(reader, _FIELDS, max_positions=131072, norm_epsilon=1.5625e-7, attention_bias=True),
        num_key_value_heads=reader.count("num_key_value_heads", default=2),
        head_dim=reader.count("head_dim", default=128),
        activation="swiglu",
        norm="rms",
        norm_position="sandwich" if reader.model_type == "glm4" else "pre",
        attention_output_bias=False,
        feed_forward_bias=False,
        **read_rotary_decoder(reader, fraction=0.5),
    )


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of `glm` or, with norms on both sides of sublayers, `glm4`."""
    is_glm4 = config.norm_position == "sandwich"
    model_type, architecture = ("glm4", "Glm4ForCausalLM") if is_glm4 else ("glm", "GlmForCausalLM")
    return write_rotary_decoder(config, model_type, architecture, _FIELDS, gated=True, writes_fraction=True)


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    head_dim, names = config.features_per_head, "q_proj k_proj v_proj o_proj"
    rotated = head_dim, int(head_dim * config.rotary_fraction)
    gate, up = (f"{OURS}feed_forward.{part}.weight" for part in ("gate", "up"))
    return {
        **embedding_and_norms(_NORMS),
        **attention(LAYER + "self_attn", OURS + "self_attention", names, rotated=rotated),
        LAYER + "mlp.gate_up_proj.weight": fused(gate, up, transpose=True),
        LAYER + "mlp.down_proj.weight": transposed(OURS + "feed_forward.down.weight"),
    }


GLM = decoder_family(
    model_types=("glm", "glm4"), read_config=_read_config, write_config=_write_config, tensors=_tensors
)
