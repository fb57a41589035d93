"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import affine, fused, same, transposed
from xformer.families.values import read_activation, read_fields, read_output, write_activation, write_decoder
from xformer.models import LanguageModel, LanguageModelConfig

_FIELDS = {
    "vocab_size": "vocab_size",
    "num_layers": "n_layer num_hidden_layers",
    "d_model": "n_embd hidden_size",
    "num_heads": "n_head num_attention_heads",
    "max_positions": "n_positions max_position_embeddings",
    "norm_epsilon": "layer_norm_epsilon",
}
_LAYER, _PARTS = "transformer.h.{i}.", ("query", "key", "value")


def _read_config(reader: ConfigReader) -> LanguageModelConfig:
    reader.require("scale_attn_weights", True)
    reader.require("scale_attn_by_inverse_layer_idx", False)
    reader.skip("n_ctx", "reorder_and_upcast_attn")
    reader.skip("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    fields = read_fields(reader, _FIELDS, norm_epsilon=1e-5)
    return LanguageModelConfig(
        **fields,
        d_ff=reader.count("n_inner", default=4 * fields["d_model"]),
        activation=read_activation(reader, "activation_function", default="gelu_new"),
        positions="learned",
        scale_embeddings=False,
        **read_output(reader),
    )


def _write_config(config: LanguageModelConfig) -> dict[str, Any]:
    return {
        **write_decoder(config, "gpt2", "GPT2LMHeadModel", _FIELDS),
        "n_inner": config.d_ff,
        "activation_function": write_activation(config),
    }


GPT2 = register(
    Family(
        model_types=("gpt2",),
        model=LanguageModel,
        read_config=_read_config,
        write_config=_write_config,
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.wte.weight"},
        ignored=("*.attn.bias", "*.attn.masked_bias"),
        tensors={
            "transformer.wte.weight": same("embedding.weight"),
            "transformer.wpe.weight": same("input.positions.weight"),
            # The matrices are those of Conv1D, (in_features, out_features) like ours.
            _LAYER + "attn.c_attn.weight": fused(*(f"layers.{{i}}.self_attention.{part}.weight" for part in _PARTS)),
            _LAYER + "attn.c_attn.bias": fused(*(f"layers.{{i}}.self_attention.{part}.bias" for part in _PARTS)),
            **affine(_LAYER + "attn.c_proj", "layers.{i}.self_attention.output"),
            **affine(_LAYER + "ln_1", "layers.{i}.self_attention_residual.norm"),
            **affine(_LAYER + "ln_2", "layers.{i}.feed_forward_residual.norm"),
            **affine(_LAYER + "mlp.c_fc", "layers.{i}.feed_forward.up"),
            **affine(_LAYER + "mlp.c_proj", "layers.{i}.feed_forward.down"),
            **affine("transformer.ln_f", "norm"),
            "lm_head.weight": transposed("output.weight"),
        },
    )
)
