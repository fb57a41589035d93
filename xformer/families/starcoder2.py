"""StarCoder 2 (Lozhkov et al., 2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import register
from xformer.families.layouts import affine, attention, feed_forward, same, transposed
from xformer.families.llama import LLAMA
from xformer.families.values import (
    SIZES,
    read_activation,
    read_fields,
    read_rotary_decoder,
    read_windows,
    write_rotary_decoder,
    write_windows,
)
from xformer.models import LanguageModelConfig

_FIELDS = {
    **SIZES,
    "num_key_value_heads": "num_key_value_heads",
    "norm_epsilon": "norm_epsilon",
    "attention_bias": "use_bias",
}


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of StarCoder 2."""
    reader.skip("attention_dropout", "residual_dropout", "embedding_dropout", "tie_word_embeddings")
    reader.skip("activation_function", "layer_norm_epsilon")  # hidden_act and norm_epsilon replace them
    reader.skip("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    reader.require("scale_attn_weights", True)
    reader.require("norm_type", "layer_norm")
    reader.require("mlp_type", "default")
    fields = read_fields(
        reader, _FIELDS, max_positions=4096, num_key_value_heads=2, norm_epsilon=1e-5, attention_bias=True
    )
    return LanguageModelConfig(
        **fields,
        head_dim=reader.count("head_dim", default=fields["d_model"] // fields["num_heads"]),
        feed_forward_bias=fields["attention_bias"],
        activation=read_activation(reader, "hidden_act", default="gelu_pytorch_tanh"),
        **read_windows(reader, ["sliding_attention"] * fields["num_layers"]),
        **read_rotary_decoder(reader),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of StarCoder 2."""
    return {
        **write_rotary_decoder(config, "starcoder2", "Starcoder2ForCausalLM", _FIELDS, gated=False),
        "head_dim": config.features_per_head,
        "sliding_window": write_windows(config)["sliding_window"],  # of all layers
    }


_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."
STARCODER2 = register(
    replace(
        LLAMA,
        model_types=("starcoder2",),
        read_config=read_config,
        write_config=write_config,
        tensors={
            "model.embed_tokens.weight": same("embedding.weight"),
            **attention(_LAYER + "self_attn", _OURS + "self_attention", "q_proj k_proj v_proj o_proj"),
            **affine(_LAYER + "input_layernorm", _OURS + "self_attention_residual.norm"),
            **affine(_LAYER + "post_attention_layernorm", _OURS + "feed_forward_residual.norm"),
            **feed_forward(_LAYER + "mlp", _OURS + "feed_forward", "c_fc c_proj"),
            **affine("model.norm", "norm"),
            "lm_head.weight": transposed("output.weight"),
        },
    )
)
