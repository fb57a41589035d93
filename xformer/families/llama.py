"""Llama, and language models whose layers have its structure and, mostly, its names of tensors.

Touvron et al. (2023); Jiang et al. (2023); Qwen team (2024, 2025); ByteDance Seed team (2025); Bakouch et al. (2025);
Granite team (2024); Abdin et al. (2024); Gunasekar et al. (2023); Li et al. (2023); Arcee (2025); Kyutai (2025); Baidu
(2025); Parmar et al. (2024); Muralidharan et al. (2024); Bellagente et al. (2024); Lozhkov et al. (2024); Cohere
(2024); GLM team (2024, 2025); OLMo team (2024, 2025); LG AI Research (2025).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.decoder import LAYER, OURS, Decoder, decoder, interleaved_decoder, norms_of
from xformer.families.family import Column, ConfigReader, Key, Tensors
from xformer.families.layouts import affine, attention, feed_forward, fused_linear, linear, plus_one, same
from xformer.families.values import (
    NO_WINDOWS,
    SWIGLU,
    activation,
    every_nth_full,
    heads,
    local_rope,
    named,
    read_windows,
    rope,
    sizes,
    windows,
    without_positions,
    write_rope,
    write_windows,
)
from xformer.models import LanguageModelConfig

_BIASES = {"attention_bias": Key("attention_bias", False), "feed_forward_bias": Key("mlp_bias", False)}
_KEYS = {**sizes("rms_norm_eps", 1e-6, 2048), **heads()}


# --- Windows ----------------------------------------------------------------------------------------------------------


def _qwen_types(reader: ConfigReader, num_layers: int) -> list[str]:
    """Return the types of layers: those from max_window_layers on have a window."""
    first = reader.count("max_window_layers", default=28, at_least=0)
    return ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]


def _first_window(config: LanguageModelConfig) -> int:
    # Before transformers 4.53, layer_types was not known.
    return [*write_windows(config)["layer_types"], "sliding_attention"].index("sliding_attention")


def _read_smollm3(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the layers without rotary positions, which may have windows."""
    num_layers, interval = fields["num_layers"], reader.count("no_rope_layer_interval", default=4)
    default = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    has_rope = reader.counts("no_rope_layers", default=default, at_least=0)[:num_layers]  # the key means the opposite
    if len(has_rope) != num_layers:
        received = f"{reader.path} has {len(has_rope)} no_rope_layers"
        raise CheckpointError(f"{received}; expected one for each of {num_layers} layers")
    layer_types = ["full_attention" if each else "sliding_attention" for each in has_rope]
    windows = read_windows(reader, layer_types, has_window=reader.flag("use_sliding_window", default=False))
    return {"layers_without_positions": [i for i, each in enumerate(has_rope) if not each], **windows}


def _write_smollm3(config: LanguageModelConfig) -> dict[str, Any]:
    without, windows = config.layers_without_positions, write_windows(config)
    return {
        **windows,
        "no_rope_layers": [int(layer not in without) for layer in range(config.num_layers)],
        "use_sliding_window": windows["sliding_window"] is not None,
    }


# --- Llama, Mistral, Qwen, Seed, SmolLM, Granite ----------------------------------------------------------------------

_LLAMA = Decoder(
    model_type="llama",
    keys={**_KEYS, **_BIASES},
    fixed={"norm": "rms", "attention_output_bias": lambda fields: fields["attention_bias"]},
    rope=rope(10000.0),
    columns=(NO_WINDOWS,),
    skipped="auto_map max_window_layers use_sliding_window",
    tensors=decoder(),
)
_MISTRAL = _LLAMA.variant(
    "mistral", keys=_KEYS, unwritten=_BIASES, columns=(windows(default=4096, keys="sliding_window"),)
)
_MINISTRAL = _MISTRAL.variant("ministral", columns=(windows(default=4096),))
_QWEN2 = _MISTRAL.variant(
    "qwen2",
    unwritten={**_BIASES, "attention_bias": Key("attention_bias", True)},
    fixed={"norm": "rms", "attention_output_bias": False},
    columns=(windows(_qwen_types, default=4096, has_flag=True),),
    written={"max_window_layers": _first_window},
)
_QWEN3 = _LLAMA.variant(
    "qwen3",
    keys={**_KEYS, **heads(head_dim=128), "attention_bias": _BIASES["attention_bias"]},
    unwritten={"feed_forward_bias": _BIASES["feed_forward_bias"]},
    fixed={**_LLAMA.fixed, "qk_norm": True},
    columns=(windows(_qwen_types, default=4096, has_flag=True),),
    written={"max_window_layers": _first_window},
)
_SEED_OSS = _LLAMA.variant(
    "seed_oss",
    keys=_LLAMA.keys
    | heads(head_dim=128)
    | named("attention_bias=true attention_output_bias:attention_out_bias=false"),
    fixed={"norm": "rms"},
)
_SMOLLM3 = _LLAMA.variant("smollm3", "SmolLM3", rope=rope(2e6), columns=(Column(_read_smollm3, _write_smollm3),))
_GRANITE = _LLAMA.variant(
    "granite",
    keys={
        **_LLAMA.keys,
        **named("embedding_scale:embedding_multiplier=1.0 residual_scale:residual_multiplier=1.0"),
        "attention_scale": Key(
            "attention_multiplier", 1.0, write=lambda c: c.attention_scale or c.features_per_head**-0.5
        ),
        "logits_scale": Key("logits_scaling", 1.0, read=lambda x: 1.0 / x, write=lambda c: 1.0 / c.logits_scale),
    },
)
_LLAMA.register(_MISTRAL, _MINISTRAL, _QWEN2, _QWEN3, _SEED_OSS, _SMOLLM3, _GRANITE)


# --- Command R and GLM ------------------------------------------------------------------------------------------------


_COHERE = Decoder(
    model_type="cohere",
    keys=sizes("layer_norm_eps", 1e-5, 8192)
    | {"num_key_value_heads": heads()["num_key_value_heads"]}
    | named("attention_bias=false logits_scale:logit_scale=0.0625"),
    fixed={"norm_bias": False, "parallel_residual": True, "shared_norm": True, "feed_forward_bias": False},
    rope=rope(5e5),
    required={"use_qk_norm": False, "use_gated_activation": True, "use_parallel_block": True}
    | {"position_embedding_type": "rope_gptj", "order_of_interleaved_layers": "local_attn_first"}
    | {"head_dim": lambda fields: fields["d_model"] // fields["num_heads"]},
    written={"head_dim": lambda config: config.features_per_head},
    skipped="use_embedding_sharing use_parallel_embedding model_max_length cache_implementation",
    tensors=lambda config: interleaved_decoder(config, {"input_layernorm": "residual.norm"}),
)
_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_COHERE2 = _COHERE.variant(
    "cohere2",
    rope=rope(10000.0),
    columns=(windows(every_nth_full(4, *_PATTERN), default=4096), Column(without_positions)),
)
_GLM_NORMS = {
    "input_layernorm": "self_attention_residual.norm",
    "post_self_attn_layernorm": "self_attention_residual.norm_after",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "post_mlp_layernorm": "feed_forward_residual.norm_after",
}


def _glm_tensors(config: LanguageModelConfig) -> Tensors:
    rotated = config.features_per_head, int(config.features_per_head * config.rotary_fraction)
    return {
        **decoder(_GLM_NORMS, names="down_proj", rotated=rotated),
        **fused_linear(LAYER + "mlp.gate_up_proj", OURS + "feed_forward", "gate up"),
    }


_GLM = Decoder(
    model_type="glm",
    keys={**sizes("rms_norm_eps", 1.5625e-7, 131072), **heads(2, 128), "attention_bias": Key("attention_bias", True)},
    fixed={"norm": "rms", "attention_output_bias": False, "feed_forward_bias": False},
    rope=rope(10000.0, 0.5),
    tensors=_glm_tensors,
)
_GLM4 = _GLM.variant("glm4", fixed={**_GLM.fixed, "norm_position": "sandwich"})
_COHERE.register(_COHERE2)
_GLM.register(_GLM4)


# --- Phi --------------------------------------------------------------------------------------------------------------


def _write_phi3_rope(config: LanguageModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling or {"rope_type": "longrope"}
    if scaling["rope_type"] != "longrope":
        raise ConfigError(f"rope_scaling has rope_type {scaling['rope_type']!r}; phi3 expects 'longrope'")
    original = scaling.get("original_max_position_embeddings", config.max_positions)
    return {**write_rope(config, writes_fraction=True), "original_max_position_embeddings": original}


_MISTRAL.variant(
    "phi3",
    keys={**sizes("rms_norm_eps", 1e-5, 2048), **heads()},
    rope=rope(10000.0, 1.0, _write_phi3_rope),
    columns=(windows(keys="sliding_window"),),
    tensors=norms_of()
    | linear(LAYER + "self_attn.o_proj", OURS + "self_attention.output")
    | linear(LAYER + "mlp.down_proj", OURS + "feed_forward.down")
    | fused_linear(LAYER + "self_attn.qkv_proj", OURS + "self_attention", "query key value")
    | fused_linear(LAYER + "mlp.gate_up_proj", OURS + "feed_forward", "gate up"),
).register()
Decoder(
    model_type="phi",
    keys={**sizes("layer_norm_eps", 1e-5, 2048), **heads(), "qk_norm": Key("qk_layernorm", False)},
    fixed={"parallel_residual": True, "shared_norm": True, "output_bias": True},
    activation=activation("hidden_act", "gelu_new"),
    rope=rope(10000.0, 0.5),
    tensors=attention(LAYER + "self_attn", OURS + "self_attention", "q_proj k_proj v_proj dense")
    | affine(LAYER + "self_attn.q_layernorm", OURS + "self_attention.query_norm")
    | affine(LAYER + "self_attn.k_layernorm", OURS + "self_attention.key_norm")
    | affine(LAYER + "input_layernorm", OURS + "residual.norm")
    | feed_forward(LAYER + "mlp", OURS + "feed_forward", "fc1 fc2")
    | affine("model.final_layernorm", "norm")
    | {"lm_head.bias": same("output_bias")},
).register()


# --- Arcee, Nemotron, Helium, ERNIE, StableLM, StarCoder 2 ------------------------------------------------------------


def _norm_plus_one(tensor: str, parameter: str) -> Tensors:
    """Return the layouts of a layer norm that multiplies by 1 + weight."""
    return {f"{tensor}.weight": plus_one(f"{parameter}.weight"), f"{tensor}.bias": same(f"{parameter}.bias")}


_ARCEE = Decoder(
    model_type="arcee",
    keys={**sizes("rms_norm_eps", 1e-5, 4096), **heads(), **_BIASES},
    fixed={"norm": "rms"},
    activation=activation("hidden_act", "relu2"),
    rope=rope(10000.0),
    tensors=decoder(),
)
_NEMOTRON = _ARCEE.variant(
    "nemotron",
    keys={**sizes("norm_eps", 1e-5, 4096), **heads(), **_BIASES},
    fixed={},
    rope=rope(10000.0, 0.5),
    tensors=decoder(norm=_norm_plus_one, names="up_proj down_proj"),
)
_HELIUM = _ARCEE.variant(
    "helium",
    keys={**_ARCEE.keys, "norm_epsilon": Key("rms_norm_eps", 1e-8)},
    fixed={"norm": "rms", "attention_output_bias": False},
    activation=SWIGLU,
    rope=rope(1e5),
    tensors=interleaved_decoder,
)
_ERNIE = _ARCEE.variant(
    "ernie4_5",
    "Ernie4_5",
    keys=sizes("rms_norm_eps", 1e-5, 131072)
    | heads(head_dim=128)
    | named("attention_bias:use_bias=false feed_forward_bias:use_bias=false"),
    activation=SWIGLU,
    rope=rope(5e5),
    required={"compression_ratio": 1.0},
    tensors=interleaved_decoder,
)


def _stablelm_tensors(config: LanguageModelConfig) -> Tensors:
    before = "residual" if config.shared_norm else "self_attention_residual"
    return decoder({"input_layernorm": f"{before}.norm", "post_attention_layernorm": "feed_forward_residual.norm"})


for _table in (_ARCEE, _HELIUM, _ERNIE, _NEMOTRON):
    _table.register()
Decoder(
    model_type="stablelm",
    architecture="StableLm",
    keys=sizes("layer_norm_eps", 1e-5, 4096)
    | heads(32)
    | named("attention_bias:use_qkv_bias=false")
    | named("parallel_residual:use_parallel_residual=false shared_norm:use_parallel_residual=false"),
    fixed={"attention_output_bias": False, "feed_forward_bias": False},
    rope=rope(10000.0, 0.25),
    required={"qk_layernorm": False, "head_dim": lambda fields: fields["d_model"] // fields["num_heads"]},
    tensors=_stablelm_tensors,
).register()
Decoder(
    model_type="starcoder2",
    keys=sizes("norm_epsilon", 1e-5, 4096)
    | heads(2)
    | named("attention_bias:use_bias=true feed_forward_bias:use_bias=true"),
    activation=activation("hidden_act", "gelu_pytorch_tanh"),
    rope=rope(10000.0),
    columns=(windows(keys="sliding_window"),),
    # hidden_act and norm_epsilon replace the first two.
    skipped="activation_function layer_norm_epsilon attention_softmax_in_fp32 scale_attention_softmax_in_fp32",
    required={"scale_attn_weights": True, "norm_type": "layer_norm", "mlp_type": "default"},
    tensors=decoder(names="c_fc c_proj"),
).register()


# --- OLMo and EXAONE --------------------------------------------------------------------------------------------------


def _read_exaone4(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of windows of EXAONE 4; if there are any, other layers have no positions."""
    keys = ("sliding_window_pattern",) if reader.values.get("layer_types") is None else ()
    reader.skip("sliding_window_pattern")
    read = {**fields, **windows(every_nth_full(4, *keys), default=4096).read(reader, fields)}
    has_window = reader.values.get("sliding_window", 4096) is not None
    return {**read, **without_positions(reader, read)} if has_window else read


_OLMO_NORMS = {
    "post_attention_layernorm": "self_attention_residual.norm",
    "post_feedforward_layernorm": "feed_forward_residual.norm",
}
_OLMO2 = Decoder(
    model_type="olmo2",
    keys={**sizes("rms_norm_eps", 1e-5, 2048), **heads(), "attention_bias": Key("attention_bias", False)},
    fixed={"norm": "rms", "norm_position": "output", "feed_forward_bias": False}
    | {"qk_norm": True, "qk_norm_all_heads": True},
    rope=rope(10000.0),
    tensors=decoder(_OLMO_NORMS),
)
_OLMO3 = _OLMO2.variant("olmo3", rope=local_rope(5e5, 5e5), columns=(windows(every_nth_full(4), default=4096),))
_EXAONE4 = _OLMO2.variant(
    "exaone4", fixed={**_OLMO2.fixed, "qk_norm_all_heads": False}, columns=(Column(_read_exaone4, write_windows),)
)
_OLMO2.register(_OLMO3, _EXAONE4)
