"""Llama, and language models whose layers have its structure and, mostly, its names of tensors.

Touvron et al. (2023); Jiang et al. (2023); Qwen team (2024, 2025); ByteDance Seed team (2025); Bakouch et al. (2025);
Granite team (2024); Abdin et al. (2024); Gunasekar et al. (2023); Li et al. (2023); Arcee (2025); Kyutai (2025); Baidu
(2025); Parmar et al. (2024); Muralidharan et al. (2024); Bellagente et al. (2024); Lozhkov et al. (2024).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.decoder import (
    HEAD_DEFAULTS,
    HEADS,
    LAYER,
    OURS,
    RMS_SIZES,
    Decoder,
    decoder,
    embedding_and_norms,
    interleaved_decoder,
    register_decoders,
)
from xformer.families.layouts import (
    Layout,
    affine,
    attention,
    feed_forward,
    fused_linear,
    linear,
    plus_one,
    same,
    transposed,
)
from xformer.families.values import SIZES, read_no_window, read_window, read_windows, write_fields, write_windows
from xformer.models import LanguageModelConfig

_BIASES = {"attention_bias": "attention_bias", "feed_forward_bias": "mlp_bias"}
_NO_BIASES = {"attention_bias": False, "feed_forward_bias": False}
_DEFAULTS = {**HEAD_DEFAULTS, "max_positions": 2048, "norm_epsilon": 1e-6, **_NO_BIASES}
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
}


# --- Windows ----------------------------------------------------------------------------------------------------------


def _read_mistral(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    return read_windows(reader, ["sliding_attention"] * fields["num_layers"], default_window=4096)


def _read_qwen(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of windows: layers from max_window_layers on have one."""
    first = reader.count("max_window_layers", default=28, at_least=0)
    types = ["sliding_attention" if i >= first else "full_attention" for i in range(fields["num_layers"])]
    has_window = reader.flag("use_sliding_window", default=False)
    return read_windows(reader, types, default_window=4096, has_window=has_window)


def _write_qwen(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    windows = write_windows(config)
    # Before transformers 4.53, layer_types was not known.
    first = [*windows["layer_types"], "sliding_attention"].index("sliding_attention")
    return {
        **values,
        **windows,
        "use_sliding_window": windows["sliding_window"] is not None,
        "max_window_layers": first,
    }


def _read_smollm3(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the layers without rotary positions, which may have windows."""
    num_layers, interval = fields["num_layers"], reader.count("no_rope_layer_interval", default=4)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    has_rope = reader.counts("no_rope_layers", default=default, at_least=0)[:num_layers]  # the key means the opposite
    if len(has_rope) != num_layers:
        raise CheckpointError(
            f"{reader.path} has {len(has_rope)} no_rope_layers; expected one for each of {num_layers} layers"
        )
    layer_types = ["full_attention" if each else "sliding_attention" for each in has_rope]
    windows = read_windows(reader, layer_types, has_window=reader.flag("use_sliding_window", default=False))
    return {"layers_without_positions": [i for i, each in enumerate(has_rope) if not each], **windows}


def _write_smollm3(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    without, windows = config.layers_without_positions, write_windows(config)
    return {
        **values,
        **windows,
        "no_rope_layers": [int(layer not in without) for layer in range(config.num_layers)],
        "use_sliding_window": windows["sliding_window"] is not None,
    }


def _window_of(config: LanguageModelConfig) -> int | None:
    return write_windows(config)["sliding_window"]  # of all layers


# --- Llama, Mistral, Qwen, Seed, SmolLM, Granite ----------------------------------------------------------------------


def _read_granite(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    scales = {field: reader.number(key, default=1.0) for field, key in _SCALES.items()}
    scales["logits_scale"] = 1.0 / reader.number("logits_scaling", default=1.0)
    return {**scales, **read_no_window(reader, fields)}


def _write_granite(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    values |= {**write_fields(config, _SCALES), "logits_scaling": 1.0 / config.logits_scale}
    return {**values, "attention_multiplier": config.attention_scale or config.features_per_head**-0.5}


_LLAMA = Decoder(
    architecture="LlamaForCausalLM",
    keys={**RMS_SIZES, **HEADS, **_BIASES},
    defaults=_DEFAULTS,
    fixed={"norm": "rms", "attention_output_bias": lambda fields: fields["attention_bias"]},
    theta=10000.0,
    skipped="auto_map max_window_layers use_sliding_window",
    read=read_no_window,
)
_MISTRAL = replace(
    _LLAMA,
    architecture="MistralForCausalLM",
    keys={**RMS_SIZES, **HEADS},
    unwritten=_BIASES,
    written={"sliding_window": _window_of},
    read=_read_mistral,
)
_TYPES = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "ministral": replace(
        _MISTRAL,
        architecture="MinistralForCausalLM",
        written={},
        write=lambda config, values: {**values, **write_windows(config)},
    ),
    "qwen2": replace(
        _MISTRAL,
        architecture="Qwen2ForCausalLM",
        defaults={**_DEFAULTS, "attention_bias": True},
        fixed={"norm": "rms", "attention_output_bias": False},
        written={},
        read=_read_qwen,
        write=_write_qwen,
    ),
    "qwen3": replace(
        _LLAMA,
        architecture="Qwen3ForCausalLM",
        keys={**RMS_SIZES, **HEADS, "attention_bias": "attention_bias"},
        unwritten={"feed_forward_bias": "mlp_bias"},
        defaults={**_DEFAULTS, "head_dim": 128},
        fixed={**_LLAMA.fixed, "qk_norm": True},
        read=_read_qwen,
        write=_write_qwen,
    ),
    "seed_oss": replace(
        _LLAMA,
        architecture="SeedOssForCausalLM",
        keys={**_LLAMA.keys, "attention_output_bias": "attention_out_bias"},
        defaults={**_DEFAULTS, "head_dim": 128, "attention_bias": True, "attention_output_bias": False},
        fixed={"norm": "rms"},
    ),
    "smollm3": replace(_LLAMA, architecture="SmolLM3ForCausalLM", theta=2e6, read=_read_smollm3, write=_write_smollm3),
    "granite": replace(_LLAMA, architecture="GraniteForCausalLM", read=_read_granite, write=_write_granite),
}


def _has_scales(config: LanguageModelConfig) -> bool:
    """Return whether a configuration has factors that only Granite has."""
    head_scale = config.features_per_head**-0.5
    scales = config.embedding_scale, config.residual_scale, config.logits_scale
    return scales != (1.0, 1.0, 1.0) or (config.attention_scale or head_scale) != head_scale


def _type_of(config: LanguageModelConfig) -> str:
    """Return the model type with the norms, biases and window of a configuration."""
    bias, output_bias = config.attention_bias, config.attention_output_bias
    output_bias = bias if output_bias is None else output_bias
    if config.qk_norm:
        model_type = "qwen3"
    elif _has_scales(config):
        model_type = "granite"
    elif config.layers_without_positions:
        model_type = "smollm3"
    elif bias and not output_bias and not config.feed_forward_bias:
        model_type = "qwen2"
    elif bias != output_bias:
        model_type = "seed_oss"
    else:
        windows = {config.window_of(layer) for layer in range(config.num_layers)}
        model_type = "llama" if windows <= {None} else "ministral" if None in windows else "mistral"
    if "feed_forward_bias" not in _TYPES[model_type].keys and config.feed_forward_bias:
        raise ConfigError(f"feed_forward_bias is True; {model_type} expects False")
    if model_type not in ("qwen2", "seed_oss") and output_bias != bias:
        raise ConfigError(f"attention_output_bias is {output_bias}; {model_type} expects {bias}")
    if model_type in ("mistral", "ministral") and bias:
        raise ConfigError(f"attention_bias is True; {model_type} expects False")
    return model_type


register_decoders(_TYPES, decoder(), type_of=_type_of)


# --- Phi --------------------------------------------------------------------------------------------------------------


def _write_phi3(config: LanguageModelConfig, values: dict[str, Any]) -> dict[str, Any]:
    scaling = config.rope_scaling or {"rope_type": "longrope"}
    if scaling["rope_type"] != "longrope":
        raise ConfigError(f"rope_scaling has rope_type {scaling['rope_type']!r}; phi3 expects 'longrope'")
    original = scaling.get("original_max_position_embeddings", config.max_positions)
    return {**values, "original_max_position_embeddings": original}


register_decoders(
    {
        "phi3": replace(
            _MISTRAL,
            architecture="Phi3ForCausalLM",
            defaults={**_DEFAULTS, "norm_epsilon": 1e-5},
            fraction=1.0,
            read=read_window,
            write=_write_phi3,
        )
    },
    {
        **embedding_and_norms(),
        **linear(LAYER + "self_attn.o_proj", OURS + "self_attention.output"),
        **linear(LAYER + "mlp.down_proj", OURS + "feed_forward.down"),
        **fused_linear(LAYER + "self_attn.qkv_proj", OURS + "self_attention", "query key value"),
        **fused_linear(LAYER + "mlp.gate_up_proj", OURS + "feed_forward", "gate up"),
    },
)
register_decoders(
    {
        "phi": Decoder(
            architecture="PhiForCausalLM",
            keys={**SIZES, **HEADS, "norm_epsilon": "layer_norm_eps", "qk_norm": "qk_layernorm"},
            defaults={**HEAD_DEFAULTS, "max_positions": 2048, "norm_epsilon": 1e-5, "qk_norm": False},
            fixed={"parallel_residual": True, "shared_norm": True, "output_bias": True},
            activation=("hidden_act", "gelu_new"),
            theta=10000.0,
            fraction=0.5,
        )
    },
    {
        "model.embed_tokens.weight": same("embedding.weight"),
        **attention(LAYER + "self_attn", OURS + "self_attention", "q_proj k_proj v_proj dense"),
        **affine(LAYER + "self_attn.q_layernorm", OURS + "self_attention.query_norm"),
        **affine(LAYER + "self_attn.k_layernorm", OURS + "self_attention.key_norm"),
        **affine(LAYER + "input_layernorm", OURS + "residual.norm"),
        **feed_forward(LAYER + "mlp", OURS + "feed_forward", "fc1 fc2"),
        **affine("model.final_layernorm", "norm"),
        "lm_head.weight": transposed("output.weight"),
        "lm_head.bias": same("output_bias"),
    },
)


# --- Arcee, Helium, ERNIE, Nemotron, StableLM, StarCoder 2 ------------------------------------------------------------

_SMALL = Decoder(
    architecture="ArceeForCausalLM",
    keys={**RMS_SIZES, **HEADS, **_BIASES},
    defaults={**_DEFAULTS, "max_positions": 4096, "norm_epsilon": 1e-5},
    fixed={"norm": "rms"},
    activation=("hidden_act", "relu2"),
    theta=10000.0,
)
register_decoders({"arcee": _SMALL}, decoder())
register_decoders(
    {
        "helium": replace(
            _SMALL,
            architecture="HeliumForCausalLM",
            defaults={**_SMALL.defaults, "norm_epsilon": 1e-8},
            fixed={"norm": "rms", "attention_output_bias": False},
            activation="swiglu",
            theta=1e5,
        )
    },
    interleaved_decoder,
)
register_decoders(
    {
        "ernie4_5": replace(
            _SMALL,
            architecture="Ernie4_5ForCausalLM",
            keys={**RMS_SIZES, **HEADS, "attention_bias": "use_bias", "feed_forward_bias": "use_bias"},
            defaults={**_SMALL.defaults, "max_positions": 131072, "head_dim": 128},
            activation="swiglu",
            theta=5e5,
            required={"compression_ratio": 1.0},
        )
    },
    interleaved_decoder,
)


def _norm_plus_one(tensor: str, parameter: str) -> dict[str, Layout]:
    """Return the layouts of a layer norm that multiplies by 1 + weight."""
    return {f"{tensor}.weight": plus_one(f"{parameter}.weight"), f"{tensor}.bias": same(f"{parameter}.bias")}


register_decoders(
    {
        "nemotron": replace(
            _SMALL,
            architecture="NemotronForCausalLM",
            keys={**SIZES, **HEADS, "norm_epsilon": "norm_eps", **_BIASES},
            fixed={},
            fraction=0.5,
        )
    },
    decoder(norm=_norm_plus_one, names="up_proj down_proj"),
)


def _stablelm_tensors(config: LanguageModelConfig) -> dict[str, Layout]:
    before = "residual" if config.shared_norm else "self_attention_residual"
    return decoder({"input_layernorm": f"{before}.norm", "post_attention_layernorm": "feed_forward_residual.norm"})


register_decoders(
    {
        "stablelm": Decoder(
            architecture="StableLmForCausalLM",
            keys={
                **SIZES,
                **HEADS,
                "norm_epsilon": "layer_norm_eps",
                "attention_bias": "use_qkv_bias",
                "parallel_residual": "use_parallel_residual",
                "shared_norm": "use_parallel_residual",
            },
            defaults={
                **HEAD_DEFAULTS,
                "num_key_value_heads": 32,
                "max_positions": 4096,
                "norm_epsilon": 1e-5,
                "attention_bias": False,
                "parallel_residual": False,
                "shared_norm": False,
            },
            fixed={"attention_output_bias": False, "feed_forward_bias": False},
            theta=10000.0,
            fraction=0.25,
            required={"qk_layernorm": False, "head_dim": HEAD_DEFAULTS["head_dim"]},
        )
    },
    _stablelm_tensors,
)
register_decoders(
    {
        "starcoder2": Decoder(
            architecture="Starcoder2ForCausalLM",
            keys={
                **SIZES,
                **HEADS,
                "norm_epsilon": "norm_epsilon",
                "feed_forward_bias": "use_bias",
                "attention_bias": "use_bias",
            },
            defaults={
                "max_positions": 4096,
                "num_key_value_heads": 2,
                "head_dim": HEAD_DEFAULTS["head_dim"],
                "norm_epsilon": 1e-5,
                "feed_forward_bias": True,
                "attention_bias": True,
            },
            activation=("hidden_act", "gelu_pytorch_tanh"),
            theta=10000.0,
            # hidden_act and norm_epsilon replace the first two.
            skipped="activation_function layer_norm_epsilon attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
            required={"scale_attn_weights": True, "norm_type": "layer_norm", "mlp_type": "default"},
            written={"sliding_window": _window_of},
            read=read_window,
        )
    },
    decoder(names="c_fc c_proj"),
)
