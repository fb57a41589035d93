"""Command R and R+ (`cohere`), and Command R7B (`cohere2`), of Cohere (2024)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import HEAD_DEFAULTS, Decoder, interleaved_decoder, register_decoders, with_windows
from xformer.families.values import SIZES, every_nth_full, read_windows_without_positions, write_windows
from xformer.models import LanguageModelConfig


def _read_windows(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of layers: some have a window, and the others no positions."""
    pattern = reader.count("sliding_window_pattern", "_sliding_window_pattern", default=4)
    return read_windows_without_positions(reader, every_nth_full(fields["num_layers"], pattern))


_COHERE = Decoder(
    architecture="CohereForCausalLM",
    keys={
        **SIZES,
        "num_key_value_heads": "num_key_value_heads",
        "norm_epsilon": "layer_norm_eps",
        "attention_bias": "attention_bias",
        "logits_scale": "logit_scale",
    },
    defaults={
        **HEAD_DEFAULTS,
        "max_positions": 8192,
        "norm_epsilon": 1e-5,
        "attention_bias": False,
        "logits_scale": 0.0625,
    },
    fixed={"norm_bias": False, "parallel_residual": True, "shared_norm": True, "feed_forward_bias": False},
    theta=5e5,
    required={
        "use_qk_norm": False,
        "use_gated_activation": True,
        "use_parallel_block": True,
        "position_embedding_type": "rope_gptj",
        "order_of_interleaved_layers": "local_attn_first",
        "head_dim": HEAD_DEFAULTS["head_dim"],
    },
    written={"head_dim": lambda config: config.features_per_head},
    skipped="use_embedding_sharing use_parallel_embedding model_max_length cache_implementation",
)


def _type_of(config: LanguageModelConfig) -> str:
    return "cohere2" if write_windows(config)["sliding_window"] or config.layers_without_positions else "cohere"


register_decoders(
    {
        "cohere": _COHERE,
        "cohere2": replace(
            _COHERE, architecture="Cohere2ForCausalLM", theta=10000.0, read=_read_windows, write=with_windows
        ),
    },
    lambda config: interleaved_decoder(config, {"input_layernorm": "residual.norm"}),
    type_of=_type_of,
)
