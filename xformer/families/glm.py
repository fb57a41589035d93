"""GLM 4 (model types `glm` and `glm4`; GLM team, 2024 and 2025)."""

from __future__ import annotations

from dataclasses import replace

from xformer.families.decoder import HEADS, LAYER, OURS, RMS_SIZES, Decoder, embedding_and_norms, register_decoders
from xformer.families.layouts import Layout, attention, fused_linear, linear
from xformer.models import LanguageModelConfig

_GLM = Decoder(
    architecture="GlmForCausalLM",
    keys={**RMS_SIZES, **HEADS, "attention_bias": "attention_bias"},
    defaults={
        "max_positions": 131072,
        "norm_epsilon": 1.5625e-7,
        "attention_bias": True,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    fixed={"norm": "rms", "attention_output_bias": False, "feed_forward_bias": False},
    theta=10000.0,
    fraction=0.5,
)
_GLM4 = replace(_GLM, architecture="Glm4ForCausalLM", fixed={**_GLM.fixed, "norm_position": "sandwich"})
_NORMS = {
    "input_layernorm": "self_attention_residual.norm",
    "post_self_attn_layernorm": "self_attention_residual.norm_after",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "post_mlp_layernorm": "feed_forward_residual.norm_after",
}


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    head_dim, names = config.features_per_head, "q_proj k_proj v_proj o_proj"
    rotated = head_dim, int(head_dim * config.rotary_fraction)
    return {
        **embedding_and_norms(_NORMS),
        **attention(LAYER + "self_attn", OURS + "self_attention", names, rotated=rotated),
        **fused_linear(LAYER + "mlp.gate_up_proj", OURS + "feed_forward", "gate up"),
        **linear(LAYER + "mlp.down_proj", OURS + "feed_forward.down"),
    }


register_decoders(
    {"glm": _GLM, "glm4": _GLM4},
    _tensors,
    type_of=lambda config: "glm4" if config.norm_position == "sandwich" else "glm",
)
