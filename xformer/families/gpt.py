"""Language models before Llama: GPT-2, OPT, BLOOM, GPT-NeoX and Pythia, Falcon.

Radford et al. (2019); Zhang et al. (2022); BigScience (2022); Black et al. (2022); Biderman et al. (2023);
Almazrouei et al. (2023); Malartic et al. (2024).
"""

from __future__ import annotations

from typing import Any

from xformer.families.decoder import Decoder
from xformer.families.family import Column, ConfigReader, Key, Tensors
from xformer.families.layouts import affine, attention, feed_forward, fused_linear, linear, same, skip_rows
from xformer.families.values import SIZES, activation, named, rope, sizes, write_rope
from xformer.models import LanguageModelConfig

_OURS = "layers.{i}."
_NAMES = "dense_h_to_4h dense_4h_to_h"
_OLD_SIZES = "vocab_size num_layers:n_layer,num_hidden_layers num_heads:n_head,num_attention_heads"


def _four_times(fields: dict[str, Any]) -> int:
    return 4 * int(fields["d_model"])


_LAYER = "transformer.h.{i}."
Decoder(
    model_type="gpt2",
    architecture="GPT2",
    head="LMHeadModel",
    keys=named(f"{_OLD_SIZES} d_model:n_embd,hidden_size max_positions:n_positions,max_position_embeddings")
    | {"norm_epsilon": Key("layer_norm_epsilon", 1e-5), "d_ff": Key("n_inner", _four_times)},
    fixed={"positions": "learned"},
    activation=activation("activation_function", "gelu_new"),
    required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    skipped="n_ctx reorder_and_upcast_attn summary_type summary_use_proj summary_activation summary_proj_to_labels",
    tensors={
        "transformer.wpe.weight": same("input.positions.weight"),
        # The matrices are those of Conv1D, (in_features, out_features) like ours.
        **fused_linear(_LAYER + "attn.c_attn", _OURS + "self_attention", "query key value", transpose=False),
        **affine(_LAYER + "attn.c_proj", _OURS + "self_attention.output"),
        **affine(_LAYER + "ln_1", _OURS + "self_attention_residual.norm"),
        **affine(_LAYER + "ln_2", _OURS + "feed_forward_residual.norm"),
        **affine(_LAYER + "mlp.c_fc", _OURS + "feed_forward.up"),
        **affine(_LAYER + "mlp.c_proj", _OURS + "feed_forward.down"),
        **affine("transformer.ln_f", "norm"),
    },
    prefix="transformer.",
    embedding="transformer.wte.weight",
    ignored=("*.attn.bias", "*.attn.masked_bias"),
).register()

_OPT_LAYER = "model.decoder.layers.{i}."
Decoder(
    model_type="opt",
    architecture="OPT",
    keys={**SIZES, "d_ff": Key("ffn_dim")},
    fixed={"positions": "learned"},
    activation=activation("activation_function", "relu"),
    # Without projected embeddings and norms after the sublayers, which only the model of 350 M has
    required={"word_embed_proj_dim": lambda fields: fields["d_model"], "do_layer_norm_before": True}
    | {"_remove_final_layer_norm": False, "enable_bias": True, "layer_norm_elementwise_affine": True},
    written={"word_embed_proj_dim": lambda config: config.d_model, "do_layer_norm_before": True},
    tensors={"model.decoder.embed_positions.weight": skip_rows(2, "input.positions.weight")}
    | attention(_OPT_LAYER + "self_attn", _OURS + "self_attention")
    | affine(_OPT_LAYER + "self_attn_layer_norm", _OURS + "self_attention_residual.norm")
    | affine(_OPT_LAYER + "final_layer_norm", _OURS + "feed_forward_residual.norm")
    | feed_forward(_OPT_LAYER[:-1], _OURS + "feed_forward", "fc1 fc2")
    | affine("model.decoder.final_layer_norm", "norm"),
    embedding="model.decoder.embed_tokens.weight",
    ignored=(),
).register()


def _layers(layer: str, name: str, num_groups: int) -> Tensors:
    """Return the layouts of the layers of BLOOM, GPT-NeoX and Falcon, without those of the norms."""
    attention = _OURS + "self_attention"
    return {
        **fused_linear(layer + name + ".query_key_value", attention, "query key value", num_heads=num_groups),
        **linear(layer + name + ".dense", attention + ".output"),
        **feed_forward(layer + "mlp", _OURS + "feed_forward", _NAMES),
    }


def _norms(layer: str) -> Tensors:
    return {
        **affine(layer + "input_layernorm", _OURS + "self_attention_residual.norm"),
        **affine(layer + "post_attention_layernorm", _OURS + "feed_forward_residual.norm"),
    }


Decoder(
    model_type="bloom",
    keys=named(f"{_OLD_SIZES} d_model:hidden_size,n_embed")
    | named("max_positions:seq_length=2048 norm_epsilon:layer_norm_epsilon=1e-5"),
    fixed={"d_ff": _four_times, "activation": "gelu_tanh", "positions": "alibi", "embedding_norm": True},
    activation=None,
    required={"apply_residual_connection_post_layernorm": False},
    skipped="unk_token_id offset_alibi slow_but_exact attention_softmax_in_fp32 masked_softmax_fusion "
    "skip_bias_add skip_bias_add_qkv",
    tensors=lambda config: {
        **affine("transformer.word_embeddings_layernorm", "input.norm"),
        **_layers(_LAYER, "self_attention", config.num_heads),
        **_norms(_LAYER),
        **affine("transformer.ln_f", "norm"),
    },
    prefix="transformer.",
    embedding="transformer.word_embeddings.weight",
    ignored=(),
).register()


def _write_neox_rope(config: LanguageModelConfig) -> dict[str, Any]:
    parameters = write_rope(config, writes_fraction=True)["rope_parameters"]
    older = {"rotary_pct": config.rotary_fraction, "rotary_emb_base": config.rope_theta}
    return {"rope_parameters": parameters, **older}


Decoder(
    model_type="gpt_neox",
    architecture="GPTNeoX",
    keys=sizes("layer_norm_eps", 1e-5) | named("parallel_residual:use_parallel_residual=true attention_bias=true"),
    activation=activation("hidden_act", "gelu"),
    rope=rope(10000.0, 0.25, _write_neox_rope),
    output="embed_out.weight",
    tensors=lambda config: {
        **_layers("gpt_neox.layers.{i}.", "attention", config.num_heads),
        **_norms("gpt_neox.layers.{i}."),
        **affine("gpt_neox.final_layer_norm", "norm"),
    },
    prefix="gpt_neox.",
    embedding="gpt_neox.embed_in.weight",
    ignored=("*.attention.bias", "*.attention.masked_bias", "*.rotary_emb.inv_freq"),
).register()


def _read_falcon(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    num_heads = fields["num_heads"]
    is_new = reader.flag("new_decoder_architecture", default=False)  # of Falcon 40B
    is_parallel = reader.flag("parallel_attn", default=True) or is_new
    num_norms = reader.count("num_ln_in_parallel_attn", default=2)
    num_groups = reader.count("num_kv_heads", "n_head_kv", default=num_heads)
    is_multi_query = reader.flag("multi_query", default=True)
    has_alibi = reader.flag("alibi", default=False)
    return {
        "num_key_value_heads": num_groups if is_new else 1 if is_multi_query else num_heads,
        "parallel_residual": is_parallel,
        "shared_norm": is_parallel and not (is_new and num_norms == 2),
        "positions": "alibi" if has_alibi else "rotary",
        "alibi_scale": (fields["d_model"] / num_heads) ** -0.5 if has_alibi else 1.0,
    }


def _write_falcon(config: LanguageModelConfig) -> dict[str, Any]:
    num_groups = config.num_key_value_heads or config.num_heads
    has_two_norms = config.parallel_residual and not config.shared_norm
    is_new = has_two_norms or num_groups not in (1, config.num_heads)
    return {
        "new_decoder_architecture": is_new,
        "num_ln_in_parallel_attn": (2 if has_two_norms else 1) if is_new else None,
        "parallel_attn": config.parallel_residual,
        "multi_query": num_groups == 1,
        "num_kv_heads": num_groups,
        "alibi": config.positions == "alibi",
    }


def _falcon_tensors(config: LanguageModelConfig) -> Tensors:
    before_attention = "residual" if config.shared_norm else "self_attention_residual"
    has_two_norms = config.parallel_residual and not config.shared_norm
    names = ("ln_attn", "ln_mlp") if has_two_norms else ("input_layernorm", "post_attention_layernorm")
    return {
        **_layers(_LAYER, "self_attention", config.num_key_value_heads or config.num_heads),
        **affine(_LAYER + names[0], f"{_OURS}{before_attention}.norm"),
        **affine(_LAYER + names[1], _OURS + "feed_forward_residual.norm"),
        **affine("transformer.ln_f", "norm"),
    }


Decoder(
    model_type="falcon",
    keys=sizes("layer_norm_epsilon", 1e-5, 2048)
    | named("num_layers:num_hidden_layers,n_layer d_model:hidden_size,n_embed num_heads:num_attention_heads,n_head")
    | {"attention_bias": Key("bias", False), "d_ff": Key("ffn_hidden_size", _four_times)},
    fixed={"feed_forward_bias": lambda fields: fields["attention_bias"]},
    activation=activation("activation", "gelu"),
    rope=rope(10000.0),
    required={"apply_residual_connection_post_layernorm": False},
    skipped="auto_map ff_factor",  # ffn_hidden_size replaces the latter
    columns=(Column(_read_falcon, _write_falcon),),
    tensors=_falcon_tensors,
    prefix="transformer.",
    embedding="transformer.word_embeddings.weight",
    ignored=("*.inv_freq",),
).register()
