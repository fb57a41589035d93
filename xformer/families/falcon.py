"""Falcon (Almazrouei et al., 2023) and Falcon 2 (Malartic et al., 2024)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, affine, feed_forward, fused_attention, linear, same, transposed
from xformer.families.values import (
    read_activation,
    read_fields,
    read_output,
    read_rope,
    write_activation,
    write_decoder,
    write_rope,
)
from xformer.models import LanguageModel, LanguageModelConfig

_FIELDS = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers n_layer",
    "d_model": "hidden_size n_embed",
    "num_heads": "num_attention_heads n_head",
    "max_positions": "max_position_embeddings",
    "norm_epsilon": "layer_norm_epsilon",
    "attention_bias": "bias",
}
_LAYER, _OURS = "transformer.h.{i}.", "layers.{i}."


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.skip("auto_map")
    reader.skip("ff_factor")  # ffn_hidden_size replaces it
    reader.require("apply_residual_connection_post_layernorm", False)
    fields = read_fields(reader, _FIELDS, max_positions=2048, norm_epsilon=1e-5, attention_bias=False)
    d_model, num_heads = fields["d_model"], fields["num_heads"]
    is_new = reader.flag("new_decoder_architecture", default=False)  # of Falcon 40B
    is_parallel = reader.flag("parallel_attn", default=True) or is_new
    num_norms = reader.count("num_ln_in_parallel_attn", default=2)
    num_groups = reader.count("num_kv_heads", "n_head_kv", default=num_heads)
    is_multi_query = reader.flag("multi_query", default=True)
    has_alibi = reader.flag("alibi", default=False)
    return LanguageModelConfig(
        **fields,
        num_key_value_heads=num_groups if is_new else 1 if is_multi_query else num_heads,
        d_ff=reader.count("ffn_hidden_size", default=4 * d_model),
        activation=read_activation(reader, "activation", default="gelu"),
        feed_forward_bias=fields["attention_bias"],
        parallel_residual=is_parallel,
        shared_norm=is_parallel and not (is_new and num_norms == 2),
        positions="alibi" if has_alibi else "rotary",
        alibi_scale=(d_model / num_heads) ** -0.5 if has_alibi else 1.0,
        scale_embeddings=False,
        **read_rope(reader),
        **read_output(reader),
    )


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    num_groups = config.num_key_value_heads or config.num_heads
    has_two_norms = config.parallel_residual and not config.shared_norm
    is_new = has_two_norms or num_groups not in (1, config.num_heads)
    return {
        **write_decoder(config, "falcon", "FalconForCausalLM", _FIELDS),
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (2 if has_two_norms else 1) if is_new else None,
        "parallel_attn": config.parallel_residual,
        "multi_query": num_groups == 1,
        "num_kv_heads": num_groups,
        "ffn_hidden_size": config.d_ff,
        "activation": write_activation(config),
        "alibi": config.positions == "alibi",
        **write_rope(config),
    }


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    attention, feed = f"{_OURS}self_attention", f"{_OURS}feed_forward"
    before_attention = f"{_OURS}residual" if config.shared_norm else f"{attention}_residual"
    has_two_norms = config.parallel_residual and not config.shared_norm
    names = ("ln_attn", "ln_mlp") if has_two_norms else ("input_layernorm", "post_attention_layernorm")
    return {
        "transformer.word_embeddings.weight": same("embedding.weight"),
        **fused_attention(
            _LAYER + "self_attention.query_key_value", attention, config.num_key_value_heads or config.num_heads
        ),
        **linear(_LAYER + "self_attention.dense", attention + ".output"),
        **feed_forward(_LAYER + "mlp", feed, "dense_h_to_4h dense_4h_to_h"),
        **affine(_LAYER + names[0], before_attention + ".norm"),
        **affine(_LAYER + names[1], feed + "_residual.norm"),
        **affine("transformer.ln_f", "norm"),
        "lm_head.weight": transposed("output.weight"),
    }


FALCON = register(
    Family(
        model_types=("falcon",),
        model=LanguageModel,
        read_config=_read_config,
        write_config=_write_config,
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.word_embeddings.weight"},
        ignored=("*.inv_freq",),
        tensors=_tensors,
    )
)
