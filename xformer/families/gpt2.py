"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from typing import Any

from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import affine, fused, same, transposed
from xformer.families.values import read_activation, read_special_ids, write_activation, write_special_ids
from xformer.models import LanguageModel, LanguageModelConfig

_LAYER, _PARTS = "transformer.h.{i}.", ("query", "key", "value")


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of GPT-2."""
    reader.require("scale_attn_weights", True)
    reader.require("scale_attn_by_inverse_layer_idx", False)
    reader.skip("n_ctx", "reorder_and_upcast_attn", "attn_pdrop", "resid_pdrop", "embd_pdrop")
    reader.skip("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
    reader.skip("summary_first_dropout", "tie_word_embeddings")
    d_model = reader.count("n_embd", "hidden_size")
    return LanguageModelConfig(
        vocab_size=reader.count("vocab_size"),
        num_layers=reader.count("n_layer", "num_hidden_layers"),
        d_model=d_model,
        num_heads=reader.count("n_head", "num_attention_heads"),
        d_ff=reader.count("n_inner", default=4 * d_model),
        activation=read_activation(reader, "activation_function", default="gelu_new"),
        norm_epsilon=reader.number("layer_norm_epsilon", default=1e-5),
        positions="learned",
        max_positions=reader.count("n_positions", "max_position_embeddings"),
        scale_embeddings=False,
        dropout=0.0,
        tie_output="lm_head.weight" in reader.tied,
        **read_special_ids(reader),
    )


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of GPT-2."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.d_ff,
        "n_positions": config.max_positions,
        "activation_function": write_activation(config),
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tie_output,
        **write_special_ids(config),
    }


GPT2 = register(
    Family(
        model_types=("gpt2",),
        model=LanguageModel,
        read_config=read_config,
        write_config=write_config,
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
