"""BART and similar encoder-decoders: mBART, Marian (OPUS-MT), Pegasus, M2M-100, NLLB, Blenderbot and BlenderbotSmall.

Lewis et al. (2020); Liu et al. (2020); Junczys-Dowmunt et al. (2018); Zhang et al. (2020); Fan et al. (2021); NLLB team
(2022); Roller et al. (2021).
"""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import Layout, affine, attention, feed_forward, same, single_row, skip_rows, transposed
from xformer.families.values import (
    read_activation,
    read_decoder_ids,
    read_fields,
    read_tied,
    write_activation,
    write_decoder_ids,
    write_fields,
)
from xformer.models import Transformer, TransformerConfig

# {model type: fields in which the types differ}
_FIELDS: dict[str, dict[str, Any]] = {
    "bart": {"norm_position": "post", "positions": "learned", "embedding_norm": True},
    "mbart": {"norm_position": "pre", "positions": "learned", "embedding_norm": True},
    "marian": {"norm_position": "post", "positions": "sinusoidal", "sinusoidal_layout": "halves"},
    "pegasus": {"norm_position": "pre", "positions": "sinusoidal", "sinusoidal_layout": "halves"},
    "m2m_100": {"norm_position": "pre", "positions": "sinusoidal", "sinusoidal_layout": "fairseq"},
    "blenderbot": {"norm_position": "pre", "positions": "learned"},
    "blenderbot-small": {
        "norm_position": "post",
        "positions": "learned",
        "embedding_norm": True,
        "decoder_norm_before_positions": True,
    },
}
_DEFAULTS = {"embedding_norm": False, "decoder_norm_before_positions": False}
_SIZES = {
    "num_encoder_layers": "encoder_layers",
    "num_decoder_layers": "decoder_layers",
    "d_model": "d_model",
    "num_heads": "encoder_attention_heads",
    "d_ff": "encoder_ffn_dim",
}
_CLASSES = {
    "bart": "BartForConditionalGeneration",
    "mbart": "MBartForConditionalGeneration",
    "marian": "MarianMTModel",
    "pegasus": "PegasusForConditionalGeneration",
    "m2m_100": "M2M100ForConditionalGeneration",
    "blenderbot": "BlenderbotForConditionalGeneration",
    "blenderbot-small": "BlenderbotSmallForConditionalGeneration",
}


def read_shared(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields whose keys are those of Whisper too."""
    reader.skip("num_hidden_layers")
    sizes = read_fields(reader, _SIZES)
    reader.require("decoder_attention_heads", sizes["num_heads"])
    reader.require("decoder_ffn_dim", sizes["d_ff"])
    activation = read_activation(reader, "activation_function", default="gelu")
    return {**sizes, "activation": activation, "dropout": 0.0, **read_decoder_ids(reader)}


def write_shared(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json keys of `read_shared`."""
    return {
        "is_encoder_decoder": True,
        **write_fields(config, _SIZES),
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.d_ff,
        "activation_function": write_activation(config),
        "tie_word_embeddings": config.tie_output,
        **write_decoder_ids(config),
    }


def _read_config(reader: ConfigReader) -> TransformerConfig:
    reader.skip("extra_pos_embeddings", "tokenizer_class")
    reader.skip("forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")
    reader.skip("static_position_embeddings", "hidden_size", "num_attention_heads", "force_bos_token_to_be_generated")
    reader.skip("do_blenderbot_90_layernorm", "layernorm_variant", "unk_token_id")
    fields = _FIELDS[reader.model_type]
    reader.require("add_bias_logits", False)  # this and the next three are keys of old files
    reader.require("add_final_layer_norm", fields["norm_position"] == "pre")
    reader.require("normalize_before", fields["norm_position"] == "pre")
    reader.require("normalize_embedding", fields.get("embedding_norm", False))
    vocab_size = reader.count("vocab_size")
    is_shared = reader.flag("share_encoder_decoder_embeddings", default=True)
    target_vocab_size = reader.count("decoder_vocab_size", default=vocab_size)
    if is_shared and target_vocab_size != vocab_size:
        raise CheckpointError(
            f"{reader.path} has decoder_vocab_size {target_vocab_size}; shared embeddings expect {vocab_size}"
        )
    return TransformerConfig(
        source_vocab_size=vocab_size,
        target_vocab_size=target_vocab_size,
        max_positions=reader.count("max_position_embeddings"),
        scale_embeddings=reader.flag("scale_embedding", default=reader.model_type == "m2m_100"),
        share_embeddings=is_shared,
        tie_output=read_tied(reader),
        output_bias="final_logits_bias" in reader.tensors,
        **fields,
        **read_shared(reader),
    )


def _model_type(config: TransformerConfig) -> str:
    """Return the model type that has the norms and positions of a configuration."""
    model_types = [
        model_type
        for model_type, fields in _FIELDS.items()
        if all(getattr(config, name) == value for name, value in {**_DEFAULTS, **fields}.items())
    ]
    if not model_types:
        raise ConfigError(
            f"norm_position is {config.norm_position!r}, positions {config.positions!r} ({config.sinusoidal_layout}), "
            f"embedding_norm {config.embedding_norm}, decoder_norm_before_positions "
            f"{config.decoder_norm_before_positions}; none of {', '.join(_FIELDS)} has this combination"
        )
    return model_types[0]


def _write_config(config: TransformerConfig) -> dict[str, Any]:
    """Translate a configuration into the config.json of the type that has its norms and positions."""
    model_type = _model_type(config)
    if not config.share_embeddings and model_type != "marian":
        raise ConfigError(f"share_embeddings is false; {model_type} expects true")
    values = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        **write_shared(config),
        "vocab_size": config.source_vocab_size,
        "max_position_embeddings": config.max_positions,
        "scale_embedding": config.scale_embeddings,
        "bos_token_id": None,
        "forced_eos_token_id": None,
    }
    if model_type == "marian":
        values["share_encoder_decoder_embeddings"] = config.share_embeddings
        values["decoder_vocab_size"] = config.target_vocab_size
    return values


def stack(side: str, *, unused_positions: int = 0) -> dict[str, Layout]:
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


def _tensors(config: TransformerConfig) -> dict[str, Layout]:
    if config.share_embeddings:
        embeddings = {"model.shared.weight": same("source_embedding.weight")}
    else:
        embeddings = {
            "model.encoder.embed_tokens.weight": same("source_embedding.weight"),
            "model.decoder.embed_tokens.weight": same("target_embedding.weight"),
        }
    unused = 0 if _model_type(config).startswith("blenderbot") else 2
    return {
        **embeddings,
        **stack("encoder", unused_positions=unused),
        **stack("decoder", unused_positions=unused),
        "final_logits_bias": single_row("output_bias"),
        "lm_head.weight": transposed("output.weight"),
    }


Family(
    model_types=tuple(_FIELDS),
    model=Transformer,
    read_config=_read_config,
    write_config=_write_config,
    prefix="model.",
    tied={
        "model.encoder.embed_tokens.weight": "model.shared.weight",
        "model.decoder.embed_tokens.weight": "model.shared.weight",
        "lm_head.weight": "model.shared.weight",
    },
    ignored=("*.embed_positions.weight", "*.version"),  # learned positions have an entry in the table
    tensors=_tensors,
).register()
