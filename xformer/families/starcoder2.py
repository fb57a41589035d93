"""StarCoder 2 (Lozhkov et al., 2024)."""

from __future__ import annotations

from xformer.families.decoder import decoder, simple_family
from xformer.families.values import SIZES

STARCODER2 = simple_family(
    "starcoder2",
    "Starcoder2ForCausalLM",
    {
        **SIZES,
        "num_key_value_heads": "num_key_value_heads",
        "norm_epsilon": "norm_epsilon",
        "feed_forward_bias": "use_bias",
        "attention_bias": "use_bias",
    },
    tensors=decoder(names="c_fc c_proj"),
    defaults={
        "max_positions": 4096,
        "num_key_value_heads": 2,
        "norm_epsilon": 1e-5,
        "feed_forward_bias": True,
        "attention_bias": True,
    },
    fixed={},
    activation="gelu_pytorch_tanh",
    has_window=True,
    skipped=(
        *("activation_function", "layer_norm_epsilon"),  # hidden_act and norm_epsilon replace them
        *("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
    ),
    required={"scale_attn_weights": True, "norm_type": "layer_norm", "mlp_type": "default"},
)
