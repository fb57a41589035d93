"""DeBERTa-v2 and v3 (He et al., 2021 and 2023), without the replaced-token detection head."""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError
from xformer.families.bert import SAME_ACTIVATION, EncoderTable, encoder_tensors, masked_lm_head
from xformer.families.family import Column, ConfigReader, Key
from xformer.families.layouts import affine, linear, same
from xformer.families.values import ACTIVATION_NAMES, read_activation, sizes
from xformer.models import EncoderConfig

# The only values that xformer computes
_FIXED = {
    "relative_attention": True,
    "share_att_key": True,
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
}
_NUM_SCORES = 3  # of contents, of contents and distances, and of distances and contents


def _head_dim(fields: dict[str, Any]) -> int:
    return int(fields["d_model"] // fields["num_heads"])


def _read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    types = reader.values.get("pos_att_type")
    types = types.lower().replace(" ", "").split("|") if isinstance(types, str) else types
    for key, value, expected in (
        *((key, reader.values.get(key), expected) for key, expected in _FIXED.items()),
        ("pos_att_type", sorted(types) if isinstance(types, list) else types, ["c2p", "p2c"]),
    ):
        if value != expected:
            raise CheckpointError(f"{reader.path} has {key} {value!r:.60}; expected {expected!r}")
    pooler = read_activation(reader, "pooler_hidden_act", default="gelu")
    is_tanh = reader.values.get("conv_act") in (None, "tanh")
    max_distance = reader.count("max_relative_positions", default=-1, at_least=-1)
    return {
        "pooler": "none" if fields["pooler"] == "none" else pooler,
        "num_token_types": reader.count("type_vocab_size", default=0, at_least=0),
        "relative_max_distance": max_distance if max_distance > 0 else fields["max_positions"],
        "convolution_size": reader.count("conv_kernel_size", default=0, at_least=0),
        "convolution_activation": "tanh" if is_tanh else read_activation(reader, "conv_act", default="gelu"),
    }


def _write(config: EncoderConfig) -> dict[str, Any]:
    return {
        "type_vocab_size": config.num_token_types,
        "max_relative_positions": config.relative_max_distance,
        "pooler_hidden_act": ACTIVATION_NAMES.get(config.pooler, "gelu"),
        "conv_kernel_size": config.convolution_size,
        "conv_act": ACTIVATION_NAMES.get(config.convolution_activation, "tanh"),
    }


EncoderTable(
    model_type="deberta-v2",
    architecture="DebertaV2",
    keys=sizes("layer_norm_eps", 1e-7, 512)
    | {"relative_buckets": Key("position_buckets", read=lambda n: 2 * n, write=lambda c: c.relative_buckets // 2)},
    columns=(Column(_read, _write),),
    pooler=("gelu", "pooler.dense.weight"),
    masked_lm=("transform.dense.weight", "lm_head.dense.weight"),
    fixed=SAME_ACTIVATION
    | {"positions": "disentangled", "attention_scale": lambda fields: (_NUM_SCORES * _head_dim(fields)) ** -0.5},
    required={"conv_groups": 1, "attention_head_size": _head_dim}
    | dict.fromkeys(("embedding_size", "pooler_hidden_size"), lambda fields: fields["d_model"]),
    skipped=f"legacy pos_att_type conv_act {' '.join(_FIXED)}",
    written={**_FIXED, "pos_att_type": ["p2c", "c2p"], "legacy": False},
    tensors=encoder_tensors("deberta.", "self.query_proj self.key_proj self.value_proj output.dense")
    | {"deberta.encoder.rel_embeddings.weight": same("distances.weight")}
    | affine("deberta.encoder.LayerNorm", "distances.norm")
    | linear("deberta.encoder.conv.conv", "layers.0.convolution")
    | affine("deberta.encoder.conv.LayerNorm", "layers.0.convolution_norm")
    | masked_lm_head("lm_predictions.lm_head.dense", "lm_predictions.lm_head.LayerNorm", "lm_predictions.lm_head")
    | linear("pooler.dense", "pooler.linear")
    | linear("classifier", "classifier"),
    tied={
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "lm_predictions.lm_head.bias",
    },
    # The head that transformers writes if `legacy` is true
    renamed={
        "cls.predictions.transform.": "lm_predictions.lm_head.",
        "cls.predictions.bias": "lm_predictions.lm_head.bias",
    },
    ignored=("*.embeddings.position_embeddings.weight", "mask_predictions.*"),
).register()
