"""Command R and R+ (`cohere`), and Command R7B (`cohere2`), of Cohere (2024)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import decoder_family, interleaved_decoder
from xformer.families.values import (
    SIZES,
    every_nth_full,
    read_fields,
    read_rotary_decoder,
    read_windows_without_positions,
    write_rotary_decoder,
    write_windows,
)
from xformer.models import LanguageModelConfig

_FIELDS = {
    **SIZES,
    "norm_epsilon": "layer_norm_eps",
    "attention_bias": "attention_bias",
    "logits_scale": "logit_scale",
}


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.skip("use_embedding_sharing", "use_parallel_embedding")
    reader.skip("model_max_length", "cache_implementation")
    reader.require("hidden_act", "silu", "swish")
    reader.require("use_qk_norm", False)
    reader.require("use_gated_activation", True)
    reader.require("use_parallel_block", True)
    reader.require("position_embedding_type", "rope_gptj")
    reader.require("order_of_interleaved_layers", "local_attn_first")
    fields = read_fields(
        reader, _FIELDS, max_positions=8192, norm_epsilon=1e-5, attention_bias=False, logits_scale=0.0625
    )
    reader.require("head_dim", fields["d_model"] // fields["num_heads"])
    return LanguageModelConfig(
        **fields,
        num_key_value_heads=reader.count("num_key_value_heads", default=fields["num_heads"]),
        activation="swiglu",
        norm_bias=False,
        parallel_residual=True,
        shared_norm=True,
        feed_forward_bias=False,
        **(_read_windows(reader, fields["num_layers"]) if reader.model_type == "cohere2" else {}),
        **read_rotary_decoder(reader, theta=5e5 if reader.model_type == "cohere" else 1e4),
    )


def _read_windows(reader: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Return the fields of layers: some have a window, and the others no positions."""
    pattern = reader.count("sliding_window_pattern", "_sliding_window_pattern", default=4)
    return read_windows_without_positions(reader, every_nth_full(num_layers, pattern))


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of `cohere` or, with windows, `cohere2`."""
    windows = write_windows(config)
    is_cohere2 = bool(windows["sliding_window"] or config.layers_without_positions)
    model_type, architecture = ("cohere2", "Cohere2ForCausalLM") if is_cohere2 else ("cohere", "CohereForCausalLM")
    return {
        **write_rotary_decoder(config, model_type, architecture, _FIELDS, gated=True),
        **(windows if is_cohere2 else {}),
    }


COHERE = decoder_family(
    model_types=("cohere", "cohere2"),
    read_config=_read_config,
    write_config=_write_config,
    tensors=lambda config: interleaved_decoder(config, {"input_layernorm": "residual.norm"}),
)
