"""StableLM (Bellagente et al., 2024)."""

from __future__ import annotations

from xformer.families.decoder import decoder, simple_family
from xformer.families.layouts import Layout
from xformer.families.values import SIZES
from xformer.models import LanguageModelConfig


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    before = "residual" if config.shared_norm else "self_attention_residual"
    return decoder({"input_layernorm": f"{before}.norm", "post_attention_layernorm": "feed_forward_residual.norm"})


STABLELM = simple_family(
    "stablelm",
    "StableLmForCausalLM",
    {
        **SIZES,
        "num_key_value_heads": "num_key_value_heads",
        "norm_epsilon": "layer_norm_eps",
        "attention_bias": "use_qkv_bias",
        "parallel_residual": "use_parallel_residual",
        "shared_norm": "use_parallel_residual",
    },
    tensors=_tensors,
    defaults={
        "max_positions": 4096,
        "num_key_value_heads": 32,
        "norm_epsilon": 1e-5,
        "attention_bias": False,
        "parallel_residual": False,
        "shared_norm": False,
    },
    fixed={"attention_output_bias": False, "feed_forward_bias": False},
    fraction=0.25,
    has_head_dim=False,
    required={"qk_layernorm": False},
)
