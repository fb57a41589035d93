"""Llama and language models of similar architecture: Mistral, Qwen 2 and 3, and Phi 3.

Touvron et al. (2023); Jiang et al. (2023); Qwen team (2024, 2025); Abdin et al. (2024).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family, register
from xformer.families.layouts import attention, fused, linear, same, transposed
from xformer.families.values import (
    read_rope,
    read_special_ids,
    write_activation,
    write_rope,
    write_special_ids,
)
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.models.config import LAYER_TYPES

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def read_config(reader: ConfigReader) -> LanguageModelConfig:
    """Translate the config.json of Llama, Mistral, Qwen 2 or 3, or Phi 3."""
    reader.skip("attention_dropout", "resid_pdrop", "embd_pdrop", "max_window_layers", "auto_map")
    reader.skip("tie_word_embeddings")  # the tensors determine it
    reader.require("hidden_act", "silu", "swish")
    d_model, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    num_layers = reader.count("num_hidden_layers")
    has_bias = reader.flag("attention_bias", default=reader.model_type == "qwen2")
    return LanguageModelConfig(
        vocab_size=reader.count("vocab_size"),
        num_layers=num_layers,
        d_model=d_model,
        num_heads=num_heads,
        num_key_value_heads=reader.count("num_key_value_heads", default=num_heads),
        head_dim=reader.count("head_dim", default=128 if reader.model_type == "qwen3" else d_model // num_heads),
        d_ff=reader.count("intermediate_size"),
        activation="swiglu",
        norm="rms",
        norm_epsilon=reader.number("rms_norm_eps", default=1e-5 if reader.model_type == "phi3" else 1e-6),
        qk_norm=reader.model_type == "qwen3",
        attention_bias=has_bias,
        attention_output_bias=False if reader.model_type == "qwen2" else has_bias,
        feed_forward_bias=reader.flag("mlp_bias", default=False),
        positions="rotary",
        max_positions=reader.count("max_position_embeddings", default=2048),
        window=_read_window(reader, num_layers),
        scale_embeddings=False,
        dropout=0.0,
        tie_output="lm_head.weight" in reader.tied,
        **read_rope(reader),
        **read_special_ids(reader),
    )


def _read_window(reader: ConfigReader, num_layers: int) -> int | None:
    """Return the window of all layers; refuse files in which only some layers have one."""
    window = reader.count("sliding_window", default=None)
    if not reader.flag("use_sliding_window", default=reader.model_type in ("mistral", "phi3")):
        window = None
    default = ["sliding_attention" if window else "full_attention"]
    layer_types = set(reader.choices("layer_types", known=LAYER_TYPES, default=default))
    if window and layer_types != {"sliding_attention"}:
        reader.require("layer_types", ["sliding_attention"] * num_layers)
    return window if layer_types == {"sliding_attention"} else None


def write_config(config: LanguageModelConfig) -> dict[str, Any]:
    """Translate a configuration into a config.json of Llama, Mistral, Qwen 2 or Qwen 3."""
    model_type = _model_type(config)
    values = {
        "architectures": [_ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_key_value_heads or config.num_heads,
        "head_dim": config.features_per_head,
        "hidden_act": write_activation(config, gated=True),
        "rms_norm_eps": config.norm_epsilon,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_output,
        **write_rope(config),
        **write_special_ids(config),
    }
    if model_type in ("llama", "qwen3"):
        values["attention_bias"] = config.attention_bias
    if model_type == "llama":
        values["mlp_bias"] = config.feed_forward_bias
    if model_type != "llama":
        values["sliding_window"] = config.window
    if model_type.startswith("qwen"):
        values |= {"use_sliding_window": config.window is not None, "max_window_layers": 0}
    return values


def _model_type(config: LanguageModelConfig) -> str:
    """Return the model type with the norms, biases and window of a configuration."""
    bias, output_bias = config.attention_bias, config.attention_output_bias
    output_bias = bias if output_bias is None else output_bias
    if config.qk_norm:
        model_type = "qwen3"
    elif bias and not output_bias:
        model_type = "qwen2"
    elif config.window is not None:
        model_type = "mistral"
    else:
        model_type = "llama"
    if model_type != "llama" and config.feed_forward_bias:
        raise ConfigError(f"feed_forward_bias is True; {model_type} expects False")
    if model_type != "qwen2" and output_bias != bias:
        raise ConfigError(f"attention_output_bias is {output_bias}; {model_type} expects {bias}")
    if model_type == "mistral" and bias:
        raise ConfigError("attention_bias is True; mistral expects False")
    return model_type


_LAYER, _OURS = "model.layers.{i}.", "layers.{i}."
_TENSORS = {
    "model.embed_tokens.weight": same("embedding.weight"),
    **attention(_LAYER + "self_attn", _OURS + "self_attention", output="o_proj"),
    _LAYER + "self_attn.q_norm.weight": same(_OURS + "self_attention.query_norm.weight"),
    _LAYER + "self_attn.k_norm.weight": same(_OURS + "self_attention.key_norm.weight"),
    _LAYER + "input_layernorm.weight": same(_OURS + "self_attention_residual.norm.weight"),
    _LAYER + "post_attention_layernorm.weight": same(_OURS + "feed_forward_residual.norm.weight"),
    **linear(_LAYER + "mlp.gate_proj", _OURS + "feed_forward.gate"),
    **linear(_LAYER + "mlp.up_proj", _OURS + "feed_forward.up"),
    **linear(_LAYER + "mlp.down_proj", _OURS + "feed_forward.down"),
    "model.norm.weight": same("norm.weight"),
    "lm_head.weight": transposed("output.weight"),
}

LLAMA = register(
    Family(
        model_types=("llama", "mistral", "qwen2", "qwen3"),
        model=LanguageModel,
        read_config=read_config,
        write_config=write_config,
        prefix="model.",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=("*.rotary_emb.inv_freq",),
        tensors=_TENSORS,
    )
)

PHI3 = register(
    Family(
        model_types=("phi3",),
        model=LanguageModel,
        read_config=read_config,
        prefix="model.",
        tied=LLAMA.tied,
        ignored=LLAMA.ignored,
        tensors={
            "model.embed_tokens.weight": same("embedding.weight"),
            _LAYER + "self_attn.qkv_proj.weight": fused(
                *(f"{_OURS}self_attention.{part}.weight" for part in ("query", "key", "value")), transpose=True
            ),
            _LAYER + "self_attn.o_proj.weight": transposed(_OURS + "self_attention.output.weight"),
            _LAYER + "input_layernorm.weight": same(_OURS + "self_attention_residual.norm.weight"),
            _LAYER + "post_attention_layernorm.weight": same(_OURS + "feed_forward_residual.norm.weight"),
            _LAYER + "mlp.gate_up_proj.weight": fused(
                *(f"{_OURS}feed_forward.{part}.weight" for part in ("gate", "up")), transpose=True
            ),
            _LAYER + "mlp.down_proj.weight": transposed(_OURS + "feed_forward.down.weight"),
            "model.norm.weight": same("norm.weight"),
            "lm_head.weight": transposed("output.weight"),
        },
    )
)
