"""Language models with mixtures of experts: Mixtral, Qwen 2 and 3 MoE, OLMoE and gpt-oss.

Jiang et al. (2024); Qwen team (2024, 2025); Muennighoff et al. (2024); OpenAI (2025).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError
from xformer.families.decoder import LAYER, OURS, Decoder, decoder
from xformer.families.family import Column, ConfigReader, Key, Tensors
from xformer.families.layouts import same, stacked_experts, transposed
from xformer.families.values import NO_WINDOWS, every_nth_full, gated, heads, named, rope, sizes, windows
from xformer.models import LanguageModelConfig

_CLAMPED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # as in ClampedFeedForward


def _expert_d_ff(config: LanguageModelConfig) -> int:
    return config.expert_d_ff or config.d_ff


def _read_dense_layers(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    step = reader.count("decoder_sparse_step", default=1)
    without = reader.counts("mlp_only_layers", default=[], at_least=0)
    return {"dense_layers": tuple(i for i in range(fields["num_layers"]) if i in without or (i + 1) % step)}


def _qwen2_types(reader: ConfigReader, num_layers: int) -> list[str]:
    """Return the types of layers: every other one up to max_window_layers has a window."""
    last = reader.count("max_window_layers", default=28, at_least=0)
    return ["full_attention" if i % 2 or i >= last else "sliding_attention" for i in range(num_layers)]


def _read_gpt_oss(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    if not reader.values.get("rope_parameters") and not reader.values.get("rope_scaling"):
        raise CheckpointError(f"{reader.path} has no key 'rope_parameters'")
    return {}


_DENSE_LAYERS = Column(
    _read_dense_layers, lambda config: {"decoder_sparse_step": 1, "mlp_only_layers": list(config.dense_layers)}
)


def _tensors(config: LanguageModelConfig) -> Tensors:
    """Return the table of tensors; those of the experts have other names in Mixtral."""
    is_mixtral = not config.qk_norm and not config.shared_expert_d_ff
    layer, ours = LAYER + ("block_sparse_moe" if is_mixtral else "mlp"), OURS + "feed_forward."
    names = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    table = {**decoder(), f"{layer}.gate.weight": transposed(f"{ours}router")}
    for name, part in zip(names, ("gate", "up", "down"), strict=True):
        table[f"{layer}.experts.{{e}}.{name}.weight"] = transposed(f"{ours}experts.{{e}}.{part}.weight")
        table[f"{layer}.shared_expert.{name}.weight"] = transposed(f"{ours}shared.{part}.weight")
    return {**table, f"{layer}.shared_expert_gate.weight": transposed(f"{ours}shared_gate")}


def _gpt_oss_tensors(config: LanguageModelConfig) -> Tensors:
    """Return the table of tensors; one has the weights of all experts."""
    table = {
        **decoder(),
        f"{LAYER}self_attn.sinks": same(f"{OURS}self_attention.sinks"),
        f"{LAYER}mlp.router.weight": transposed(f"{OURS}feed_forward.router"),
        f"{LAYER}mlp.router.bias": same(f"{OURS}feed_forward.router_bias"),
    }
    expert = f"{OURS}feed_forward.experts.{{e}}."
    for name, parts in {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}.items():
        for suffix, kind in {"": "weight", "_bias": "bias"}.items():
            parameters = [f"{expert}{part}.{kind}" for part in parts]
            table[f"{LAYER}mlp.experts.{name}{suffix}"] = stacked_experts(config.num_experts, *parameters)
    return table


_MIXTRAL = Decoder(
    model_type="mixtral",
    keys=sizes("rms_norm_eps", 1e-5, 2048)
    | heads(8)
    | {"d_ff": Key("intermediate_size", write=_expert_d_ff)}
    | named("num_experts:num_local_experts,num_experts=8 num_experts_per_token:num_experts_per_tok=2"),
    fixed={"norm": "rms", "attention_bias": False, "feed_forward_bias": False},
    rope=rope(1e6),
    skipped="router_jitter_noise output_router_logits router_aux_loss_coef use_sliding_window max_window_layers",
    columns=(windows(keys="sliding_window"),),
    tensors=_tensors,
)
_OLMOE = _MIXTRAL.variant(
    "olmoe",
    keys=_MIXTRAL.keys
    | heads()
    | named("num_experts:num_experts,num_local_experts=64 num_experts_per_token:num_experts_per_tok=8")
    | named("normalize_expert_weights:norm_topk_prob=false attention_bias=false"),
    fixed={"norm": "rms", "feed_forward_bias": False, "qk_norm": True, "qk_norm_all_heads": True},
    rope=rope(1e4),
    columns=(NO_WINDOWS,),
)
_QWEN3 = _OLMOE.variant(
    "qwen3_moe",
    keys=_OLMOE.keys
    | heads(4)
    | named("d_ff:intermediate_size norm_epsilon:rms_norm_eps=1e-6 num_experts:num_experts,num_local_experts=128")
    | {"expert_d_ff": Key("moe_intermediate_size", 768, write=_expert_d_ff)},
    fixed={"norm": "rms", "feed_forward_bias": False, "qk_norm": True},
    columns=(_DENSE_LAYERS, windows(default=4096, has_flag=True, keys="sliding_window")),
)
_QWEN2 = _QWEN3.variant(
    "qwen2_moe",
    keys=_QWEN3.keys
    | heads(16)
    | named("num_experts:num_experts,num_local_experts=60 num_experts_per_token:num_experts_per_tok=4")
    | named("shared_expert_d_ff:shared_expert_intermediate_size=5632 attention_bias:qkv_bias=true")
    | {"expert_d_ff": Key("moe_intermediate_size", 1408, write=_expert_d_ff)},
    fixed={"norm": "rms", "attention_output_bias": False, "feed_forward_bias": False},
    columns=(_DENSE_LAYERS, windows(_qwen2_types, default=4096, has_flag=True)),
)
_GPT_OSS = _MIXTRAL.variant(
    "gpt_oss",
    keys=_MIXTRAL.keys
    | heads(8, 64)
    | named("num_experts:num_local_experts,num_experts=128 attention_bias=true")
    | named("num_experts_per_token:num_experts_per_tok,experts_per_token=4"),
    fixed={"norm": "rms", "attention_sinks": True, "router_bias": True},
    activation=gated("swiglu_clamped"),
    rope=rope(150000.0),
    required=_CLAMPED,
    skipped="output_router_logits router_aux_loss_coef initial_context_length",
    written=_CLAMPED,
    columns=(Column(_read_gpt_oss), windows(every_nth_full(2), default=128)),
    tensors=_gpt_oss_tensors,
)
_MIXTRAL.register(_QWEN2, _QWEN3, _OLMOE)
_GPT_OSS.register()
