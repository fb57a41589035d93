"""Values of config.json that several families share: activations, rotary positions and special tokens."""

from __future__ import annotations

from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.config_reader import ConfigReader
from xformer.models.config import GATED, EncoderConfig, ImageEncoderConfig, ModelConfig

_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
_ACTIVATION_NAMES = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
_ROPE_TYPES = {
    "default": None,
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def read_activation(reader: ConfigReader, *keys: str, default: str) -> str:
    """Return the xformer name of an activation.

    Raises:
        CheckpointError: If xformer does not have the activation.
    """
    return _ACTIVATIONS[reader.choice(*keys, known=_ACTIVATIONS, default=default)]


def write_activation(config: ModelConfig, *, gated: bool = False) -> str:
    """Return the Hugging Face name of the activation.

    Raises:
        ConfigError: If `gated` does not apply to the feed-forward network.
    """
    if (config.activation in GATED) != gated:
        raise ConfigError(f"activation is {config.activation!r}; expected {'a' if gated else 'no'} gated one")
    return _ACTIVATION_NAMES[GATED.get(config.activation, config.activation)]


def read_rope(reader: ConfigReader, *, theta: float = 10000.0, fraction: float = 1.0) -> dict[str, Any]:
    """Return the fields of rotary positions; reads files of transformers 5 (rope_parameters) and older ones.

    Args:
        reader: The configuration. Its rope_parameters may have one entry for each type of layer.
        theta: Default of rope_theta.
        fraction: Default of partial_rotary_factor.
    """
    rope = reader.section("rope_parameters", "rope_scaling")
    reader.skip("rope_scaling")
    rope = rope.section("full_attention") if "full_attention" in rope.values else rope
    theta = rope.number("rope_theta", default=reader.number("rope_theta", "rotary_emb_base", default=theta))
    keys = ("partial_rotary_factor", "rotary_pct")
    fraction = rope.number(keys[0], default=reader.number(*keys, default=fraction))
    rope_type = rope.choice("rope_type", "type", known=_ROPE_TYPES, default="default")
    max_positions = reader.count("max_position_embeddings", default=2048)
    original = rope.count("original_max_position_embeddings", default=max_positions)
    original = reader.count("original_max_position_embeddings", default=original)
    fields: dict[str, Any] = {"rope_theta": theta, "rotary_fraction": fraction}
    if rope_type == "default":
        return fields
    unscaled = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
    scaling = {key: value for key, value in rope.values.items() if key not in unscaled}
    if rope_type in ("llama3", "yarn", "longrope", "su"):
        scaling["original_max_position_embeddings"] = original
        if rope_type != "llama3":
            scaling["factor"] = rope.number("factor", default=max_positions / original)
    return {**fields, "rope_scaling": {"rope_type": _ROPE_TYPES[rope_type], **scaling}}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json keys of rotary positions, both those of transformers 5 and the older ones."""
    scaling = config.rope_scaling
    fraction = {} if config.rotary_fraction == 1.0 else {"partial_rotary_factor": config.rotary_fraction}
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta, **fraction}
    return {"rope_parameters": rope, "rope_theta": config.rope_theta, "rope_scaling": scaling, **fraction}


def read_special_ids(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of special tokens of a language model; eos_token_id may be a list.

    A missing bos token is the eos token. A missing eos token is 0.
    """
    eos_ids = reader.counts("eos_token_id", default=[], at_least=0)
    eos_id = eos_ids[0] if eos_ids else 0
    return {
        "pad_id": reader.count("pad_token_id", default=None, at_least=0),
        "bos_id": reader.count("bos_token_id", default=eos_id, at_least=0),
        "eos_id": eos_id,
        "suppress_special": False,
    }


def read_decoder_ids(reader: ConfigReader, *, start: int | None = None) -> dict[str, Any]:
    """Return the fields of special tokens of an encoder-decoder; its bos_id is the decoder_start_token_id."""
    fields = read_special_ids(reader)
    default = fields["bos_id"] if start is None else start
    return {**fields, "bos_id": reader.count("decoder_start_token_id", default=default, at_least=0)}


def write_special_ids(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json keys of special tokens."""
    return {"pad_token_id": config.pad_id, "bos_token_id": config.bos_id, "eos_token_id": config.eos_id}


def has_tensor(reader: ConfigReader, ending: str) -> bool:
    """Return whether the name of a tensor of the checkpoint has this ending."""
    return any(name.endswith(ending) for name in reader.tensors)


def read_labels(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of a classifier; config.json may give the number of classes by their names only."""
    names = reader.section("id2label").values
    number = reader.count("num_labels", "_num_labels", default=2, at_least=0)
    if not (has_tensor(reader, "classifier.weight") or has_tensor(reader, "classifier.out_proj.weight")):
        return {}
    if not names:
        return {"num_labels": number}
    labels = [names.get(str(i)) for i in range(len(names))]
    if not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{reader.path} has id2label {names!r:.60}; expected a name for each number from 0")
    return {"num_labels": len(labels), "labels": None if labels == _default_labels(len(labels)) else labels}


def write_labels(config: EncoderConfig | ImageEncoderConfig) -> dict[str, Any]:
    """Return the config.json key with the names of the classes, which transformers counts."""
    labels = config.labels or _default_labels(config.num_labels)
    return {"id2label": {str(i): label for i, label in enumerate(labels)}} if labels else {}


def _default_labels(count: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(count)]
