"""Phi 1, 1.5 and 2 (Gunasekar et al., 2023; Li et al., 2023)."""

from __future__ import annotations

from xformer.families.decoder import LAYER, OURS, simple_family
from xformer.families.layouts import affine, attention, feed_forward, same, transposed
from xformer.families.values import SIZES

PHI = simple_family(
    "phi",
    "PhiForCausalLM",
    {**SIZES, "norm_epsilon": "layer_norm_eps", "qk_norm": "qk_layernorm"},
    tensors={
        "model.embed_tokens.weight": same("embedding.weight"),
        **attention(LAYER + "self_attn", OURS + "self_attention", "q_proj k_proj v_proj dense"),
        **affine(LAYER + "self_attn.q_layernorm", OURS + "self_attention.query_norm"),
        **affine(LAYER + "self_attn.k_layernorm", OURS + "self_attention.key_norm"),
        **affine(LAYER + "input_layernorm", OURS + "residual.norm"),
        **feed_forward(LAYER + "mlp", OURS + "feed_forward", "fc1 fc2"),
        **affine("model.final_layernorm", "norm"),
        "lm_head.weight": transposed("output.weight"),
        "lm_head.bias": same("output_bias"),
    },
    defaults={"max_positions": 2048, "norm_epsilon": 1e-5, "qk_norm": False},
    fixed={"parallel_residual": True, "shared_norm": True, "output_bias": True},
    activation="gelu_new",
    fraction=0.5,
)
