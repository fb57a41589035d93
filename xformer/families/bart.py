"""BART, mBART, Marian (OPUS-MT), Pegasus, M2M-100, NLLB, Blenderbot and BlenderbotSmall, and Whisper.

Lewis et al. (2020); Liu et al. (2020); Junczys-Dowmunt et al. (2018); Zhang et al. (2020); Fan et al. (2021); NLLB team
(2022); Roller et al. (2021); Radford et al. (2023).
"""

from __future__ import annotations

from typing import Any

from xformer.families.family import Column, Key, Table, Tensors
from xformer.families.layouts import affine, attention, feed_forward, linear, same, single_row, skip_rows, transposed
from xformer.families.values import activation, named, read_decoder_ids, tied, write_decoder_ids
from xformer.models import SpeechTransformer, Transformer, TransformerConfig

# What Whisper has, too
_SHARED = Table(
    model_type="",
    model=Transformer,
    keys=named(
        "num_encoder_layers:encoder_layers num_decoder_layers:decoder_layers d_model num_heads:encoder_attention_heads "
        "d_ff:encoder_ffn_dim"
    ),
    columns=(
        activation("activation_function", "gelu"),
        Column(lambda reader, fields: read_decoder_ids(reader), write_decoder_ids),
    ),
    fixed={"dropout": 0.0},
    required={
        "decoder_attention_heads": lambda fields: fields["num_heads"],
        "decoder_ffn_dim": lambda fields: fields["d_ff"],
    },
    skipped="num_hidden_layers",
    prefix="model.",
    written={
        "is_encoder_decoder": True,
        "decoder_attention_heads": lambda config: config.num_heads,
        "decoder_ffn_dim": lambda config: config.d_ff,
    },
)


_COPIES = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")  # of the embedding, in tied models


def _table(model_type: str, architecture: str, **fields: Any) -> Table:
    """Return the table of a type, with the fields in which types differ."""
    is_pre = fields["norm_position"] == "pre"
    # Written for Marian only
    embeddings = {
        "share_embeddings": Key("share_encoder_decoder_embeddings", True),
        "target_vocab_size": Key("decoder_vocab_size", lambda fields: fields["source_vocab_size"]),
    }
    return _SHARED.variant(
        model_type,
        architecture,
        keys=named("source_vocab_size:vocab_size max_positions:max_position_embeddings")
        | {"scale_embeddings": Key("scale_embedding", model_type == "m2m_100")}
        | _SHARED.keys
        | (embeddings if model_type == "marian" else {}),
        unwritten={} if model_type == "marian" else embeddings,
        columns=(
            *_SHARED.columns,
            tied(),
            Column(lambda reader, fields: {"output_bias": "final_logits_bias" in reader.tensors}),
        ),
        fixed={**_SHARED.fixed, **fields},
        required={
            **_SHARED.required,
            "add_bias_logits": False,  # this and the next three are keys of old files
            "add_final_layer_norm": is_pre,
            "normalize_before": is_pre,
            "normalize_embedding": fields.get("embedding_norm", False),
        },
        skipped="extra_pos_embeddings tokenizer_class forced_bos_token_id forced_eos_token_id bad_words_ids "
        "hidden_size num_attention_heads static_position_embeddings force_bos_token_to_be_generated "
        f"do_blenderbot_90_layernorm layernorm_variant unk_token_id {_SHARED.skipped}",
        written={**_SHARED.written, "bos_token_id": None, "forced_eos_token_id": None},
        tensors=_tensors,
        tied={f"{name}.weight": "model.shared.weight" for name in _COPIES},
        ignored=("*.embed_positions.weight", "*.version"),  # learned positions have an entry in the table
    )


def _stack(side: str, *, unused_positions: int = 0) -> Tensors:
    """Return the layouts of one side, "encoder" or "decoder": its positions, layers and norms.

    The first rows of the table of positions may be unused.
    """
    theirs, ours = f"model.{side}.layers.{{i}}.", f"{side}.{{i}}."
    tensors = {
        f"model.{side}.embed_positions.weight": skip_rows(unused_positions, f"{side}_input.positions.weight"),
        **affine(f"model.{side}.layernorm_embedding", f"{side}_input.norm"),
        **attention(theirs + "self_attn", ours + "self_attention"),
        **affine(theirs + "self_attn_layer_norm", ours + "self_attention_residual.norm"),
        **feed_forward(theirs[:-1], ours + "feed_forward", "fc1 fc2"),
        **affine(theirs + "final_layer_norm", ours + "feed_forward_residual.norm"),
        **affine(f"model.{side}.layer_norm", f"{side}_norm"),
    }
    if side == "decoder":
        tensors |= attention(theirs + "encoder_attn", ours + "cross_attention")
        tensors |= affine(theirs + "encoder_attn_layer_norm", ours + "cross_attention_residual.norm")
    return tensors


def _tensors(config: TransformerConfig) -> Tensors:
    if config.share_embeddings:
        embeddings = {"model.shared.weight": same("source_embedding.weight")}
    else:
        embeddings = {
            "model.encoder.embed_tokens.weight": same("source_embedding.weight"),
            "model.decoder.embed_tokens.weight": same("target_embedding.weight"),
        }
    unused = 2 if config.embedding_norm and not config.decoder_norm_before_positions else 0  # not in Blenderbot
    return {
        **embeddings,
        **_stack("encoder", unused_positions=unused),
        **_stack("decoder", unused_positions=unused),
        "final_logits_bias": single_row("output_bias"),
        "lm_head.weight": transposed("output.weight"),
    }


_LEARNED = {"positions": "learned", "embedding_norm": True}
_SINUSOIDAL = {"positions": "sinusoidal", "sinusoidal_layout": "halves"}
_FAIRSEQ = {"positions": "sinusoidal", "sinusoidal_layout": "fairseq"}
_GENERATION = "ForConditionalGeneration"
_table("bart", f"Bart{_GENERATION}", norm_position="post", **_LEARNED).register(
    _table("mbart", f"MBart{_GENERATION}", norm_position="pre", **_LEARNED),
    _table("marian", "MarianMTModel", norm_position="post", **_SINUSOIDAL),
    _table("pegasus", f"Pegasus{_GENERATION}", norm_position="pre", **_SINUSOIDAL),
    _table("m2m_100", f"M2M100{_GENERATION}", norm_position="pre", **_FAIRSEQ),
    _table("blenderbot", f"Blenderbot{_GENERATION}", norm_position="pre", positions="learned"),
    _table(
        "blenderbot-small",
        f"BlenderbotSmall{_GENERATION}",
        norm_position="post",
        decoder_norm_before_positions=True,
        **_LEARNED,
    ),
)


# --- Whisper ----------------------------------------------------------------------------------------------------------

_OUTPUT = "proj_out.weight"
_SHARED.variant(
    "whisper",
    "WhisperForConditionalGeneration",
    model=SpeechTransformer,
    keys=_SHARED.keys
    | named("source_vocab_size:num_mel_bins=80 target_vocab_size:vocab_size max_source_positions=1500")
    | named("max_positions:max_target_positions=448"),
    columns=(*_SHARED.columns, tied(_OUTPUT)),
    fixed={**_SHARED.fixed, "key_bias": False, "positions": "learned", "scale_embeddings": False},
    required={**_SHARED.required, "use_weighted_layer_sum": False},
    # scale_embedding, which transformers does not use, and keys for training or generation only
    skipped="classifier_proj_size median_filter_width scale_embedding apply_spec_augment mask_time_prob "
    "mask_time_length mask_time_min_masks mask_feature_prob mask_feature_length mask_feature_min_masks "
    f"suppress_tokens begin_suppress_tokens forced_decoder_ids {_SHARED.skipped}",
    written={**_SHARED.written, "bos_token_id": lambda config: config.bos_id, "begin_suppress_tokens": None},
    tensors={"model.decoder.embed_tokens.weight": same("target_embedding.weight"), _OUTPUT: transposed("output.weight")}
    | _stack("encoder")
    | _stack("decoder")
    | linear("model.encoder.conv1", "source_embedding.conv1")
    | linear("model.encoder.conv2", "source_embedding.conv2"),
    tied={_OUTPUT: "model.decoder.embed_tokens.weight"},
).register()
