"""BLOOM (BigScience, 2022)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import Layout, affine, feed_forward, fused_attention, linear, same, transposed
from xformer.families.values import read_fields, read_output, write_decoder
from xformer.models import LanguageModel, LanguageModelConfig

_FIELDS = {
    "vocab_size": "vocab_size",
    "num_layers": "n_layer num_hidden_layers",
    "d_model": "hidden_size n_embed",
    "num_heads": "n_head num_attention_heads",
    "max_positions": "seq_length",
    "norm_epsilon": "layer_norm_epsilon",
}
_LAYER, _OURS = "transformer.h.{i}.", "layers.{i}."


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.skip("unk_token_id", "offset_alibi")
    reader.skip("slow_but_exact", "attention_softmax_in_fp32", "masked_softmax_fusion")
    reader.skip("skip_bias_add", "skip_bias_add_qkv")
    reader.require("apply_residual_connection_post_layernorm", False)
    fields = read_fields(reader, _FIELDS, max_positions=2048, norm_epsilon=1e-5)
    return LanguageModelConfig(
        **fields,
        d_ff=4 * fields["d_model"],
        activation="gelu_tanh",
        positions="alibi",
        embedding_norm=True,
        scale_embeddings=False,
        **read_output(reader),
    )


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    return write_decoder(config, "bloom", "BloomForCausalLM", _FIELDS)


def _tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    return {
        "transformer.word_embeddings.weight": same("embedding.weight"),
        **affine("transformer.word_embeddings_layernorm", "input.norm"),
        **fused_attention(_LAYER + "self_attention.query_key_value", _OURS + "self_attention", config.num_heads),
        **linear(_LAYER + "self_attention.dense", _OURS + "self_attention.output"),
        **feed_forward(_LAYER + "mlp", _OURS + "feed_forward", "dense_h_to_4h dense_4h_to_h"),
        **affine(_LAYER + "input_layernorm", _OURS + "self_attention_residual.norm"),
        **affine(_LAYER + "post_attention_layernorm", _OURS + "feed_forward_residual.norm"),
        **affine("transformer.ln_f", "norm"),
        "lm_head.weight": transposed("output.weight"),
    }


BLOOM = register(
    Family(
        model_types=("bloom",),
        model=LanguageModel,
        read_config=_read_config,
        write_config=_write_config,
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.word_embeddings.weight"},
        tensors=_tensors,
    )
)
