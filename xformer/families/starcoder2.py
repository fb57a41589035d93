"""StarCoder 2 (Lozhkov et al., 2024)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import decoder, decoder_family
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


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
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


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    return {
        **write_rotary_decoder(config, "starcoder2", "Starcoder2ForCausalLM", _FIELDS, gated=False),
        "sliding_window": write_windows(config)["sliding_window"],  # of all layers
    }


STARCODER2 = decoder_family(
    model_types=("starcoder2",),
    read_config=_read_config,
    write_config=_write_config,
    tensors=decoder(names="c_fc c_proj"),
)
