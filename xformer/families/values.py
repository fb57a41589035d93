"""Keys and columns of config.json that families share: sizes, activations, positions, windows, tokens and labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from xformer.errors import CheckpointError, ConfigError
from xformer.families.family import REQUIRED, Column, ConfigReader, Key
from xformer.models import EncoderConfig, ImageEncoderConfig, LanguageModelConfig, ModelConfig, TransformerConfig
from xformer.models.config import GATED, LAYER_TYPES, PROBLEM_TYPES

_ACTIVATIONS = {name: name for name in ("relu", "gelu", "silu", "quick_gelu")}
_ACTIVATIONS |= {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "swish": "silu", "relu2": "relu_squared"}
# The first name of each
ACTIVATION_NAMES = {function: name for name, function in reversed(_ACTIVATIONS.items())}
# Types whose embedding is not the output matrix unless tie_word_embeddings says so
_UNTIED = """
arcee exaone4 glm glm4 gpt_neox gpt_oss granite helium llama ministral mistral mixtral nemotron olmo2 olmo3 olmoe phi
phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss stablelm
"""
_PREFIXES = ("model.", "transformer.", "gpt_neox.")  # of language models; base models have none
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "su")  # the last two are the same


# --- Sizes and heads --------------------------------------------------------------------------------------------------


def named(fields: str) -> dict[str, Key]:
    """Return keys from "FIELD:KEY,OLD_KEY=DEFAULT ...".

    FIELD alone is a key of the same name. A key without a default, which is in JSON, is required.
    """
    keys = {}
    for each in fields.split():
        name, _, default = each.partition("=")
        field, _, names = name.partition(":")
        keys[field] = Key(names.replace(",", " ") or field, json.loads(default) if default else REQUIRED)
    return keys


SIZES = named(
    "vocab_size num_layers:num_hidden_layers d_model:hidden_size num_heads:num_attention_heads d_ff:intermediate_size "
    "max_positions:max_position_embeddings"
)


def sizes(epsilon: str, default: float, max_positions: Any = REQUIRED, **defaults: int) -> dict[str, Key]:
    """Return the keys of sizes of most families, and of the epsilon of norms, all with their defaults."""
    known: dict[str, Any] = {"max_positions": max_positions, **defaults}
    keys = {field: Key(key.names, known.get(field, REQUIRED)) for field, key in SIZES.items()}
    return {**keys, "norm_epsilon": Key(epsilon, default)}


def heads(num_key_value_heads: Any = None, head_dim: int | None = None) -> dict[str, Key]:
    """Return the keys of heads; by default there are num_heads, and d_model / num_heads features in each."""
    number = num_key_value_heads or (lambda fields: fields["num_heads"])
    features = head_dim or (lambda fields: fields["d_model"] // fields["num_heads"])
    return {
        "num_key_value_heads": Key("num_key_value_heads", number, write=lambda c: c.num_key_value_heads or c.num_heads),
        "head_dim": Key("head_dim", features, write=lambda c: c.features_per_head),
    }


# --- Activations ------------------------------------------------------------------------------------------------------


def read_activation(reader: ConfigReader, *keys: str, default: str, gated: bool = False) -> str:
    """Return the xformer name of an activation, `gated` or not; raise CheckpointError if xformer does not have it."""
    names = {function: name for name, function in GATED.items()} if gated else {x: x for x in ACTIVATION_NAMES}
    known = [key for key, function in _ACTIVATIONS.items() if function in names]
    return names[_ACTIVATIONS[reader.choice(*keys, known=known, default=default)]]


def write_activation(config: ModelConfig, *, gated: bool = False) -> str:
    """Return the Hugging Face name of the activation; raise ConfigError unless it is `gated`, or not, as expected."""
    if (config.activation in GATED) != gated:
        raise ConfigError(f"activation is {config.activation!r}; expected {'a' if gated else 'no'} gated one")
    return ACTIVATION_NAMES[GATED.get(config.activation, config.activation)]


def activation(key: str, default: str, *, gated: bool = False) -> Column:
    """Return the column of the activation of the feed-forward network; see `read_activation`."""
    return Column(
        lambda reader, fields: {"activation": read_activation(reader, key, default=default, gated=gated)},
        lambda config: {key: write_activation(config, gated=gated)},
    )


def gated(name: str) -> Column:
    """Return the column of a gated activation whose function must be SiLU."""

    def read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
        reader.require("hidden_act", "silu", "swish")
        return {"activation": name}

    return Column(read, lambda config: {"hidden_act": write_activation(config, gated=True)})


SWIGLU = gated("swiglu")


# --- Rotary positions -------------------------------------------------------------------------------------------------


def rope(theta: float, fraction: float | None = None, write: Callable[[Any], dict[str, Any]] | None = None) -> Column:
    """Return the column of rotary positions; see `read_rope`. The default of `write` is `write_rope`."""
    return Column(
        lambda reader, fields: read_rope(reader, theta=theta, fraction=fraction),
        write or (lambda config: write_rope(config, writes_fraction=fraction is not None)),
    )


def local_rope(theta: float, local_theta: float, *, key: str = "", local_key: str = "") -> Column:
    """Return the column of rotary positions whose base is another one in layers with a window, and unscaled.

    Args:
        theta: Default of the base.
        local_theta: Default of that of layers with a window.
        key: Key of the base in old files.
        local_key: That of layers with a window.
    """

    def read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
        by_key = reader.number(*local_key.split(), default=local_theta)
        local = reader.section("rope_parameters").section("sliding_attention")
        local.choice("rope_type", known=("default",), default="default")
        own = read_rope(reader, theta=reader.number(*key.split(), default=theta))
        return {**own, "rope_local_theta": local.number("rope_theta", default=by_key)}

    def write(config: LanguageModelConfig | EncoderConfig) -> dict[str, Any]:
        local = {"rope_type": "default", "rope_theta": config.rope_local_theta or config.rope_theta}
        full = write_rope(config)["rope_parameters"]
        return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}

    return Column(read, write)


def read_rope(reader: ConfigReader, *, theta: float = 10000.0, fraction: float | None = None) -> dict[str, Any]:
    """Return the fields of rotary positions; reads files of transformers 5 (rope_parameters) and older ones.

    The defaults are those of rope_theta and partial_rotary_factor; rope_parameters may have an entry by type of layer.
    A fraction of None means that the family rotates all features.
    """
    rope = reader.section("rope_parameters", "rope_scaling")
    reader.skip("rope_scaling")
    rope = rope.section("full_attention") if "full_attention" in rope.values else rope
    theta = rope.number("rope_theta", default=reader.number("rope_theta", "rotary_emb_base", default=theta))
    keys = ("partial_rotary_factor", "rotary_pct")
    rotated = rope.number(keys[0], default=reader.number(*keys, default=1.0 if fraction is None else fraction))
    if fraction is None and rotated != 1.0:
        received = f"{reader.path} has partial_rotary_factor {rotated}"
        raise CheckpointError(f"{received}; models of type {reader.model_type} expect 1")
    rope_type = rope.choice("rope_type", "type", known=_ROPE_TYPES, default="default")
    max_positions = reader.count("max_position_embeddings", default=2048)
    original = rope.count("original_max_position_embeddings", default=max_positions)
    original = reader.count("original_max_position_embeddings", default=original)
    fields: dict[str, Any] = {"positions": "rotary", "rope_theta": theta, "rotary_fraction": rotated}
    if rope_type == "default":
        return fields
    unscaled = ("rope_theta", "partial_rotary_factor", "rope_type", "type")
    scaling = {key: value for key, value in rope.values.items() if key not in unscaled}
    if rope_type in ("llama3", "yarn", "longrope", "su"):
        scaling["original_max_position_embeddings"] = original
        if rope_type != "llama3":
            scaling["factor"] = rope.number("factor", default=max_positions / original)
    return {**fields, "rope_scaling": {"rope_type": "longrope" if rope_type == "su" else rope_type, **scaling}}


def write_rope(config: ModelConfig, *, writes_fraction: bool = False) -> dict[str, Any]:
    """Return the config.json keys of rotary positions, both those of transformers 5 and the older ones.

    partial_rotary_factor is among them if it is not 1, or with `writes_fraction`: its default differs between families.
    """
    scaling, fraction = config.rope_scaling, {"partial_rotary_factor": config.rotary_fraction}
    fraction = fraction if writes_fraction or config.rotary_fraction != 1.0 else {}
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": config.rope_theta, **fraction}
    return {"rope_parameters": rope, "rope_theta": config.rope_theta, "rope_scaling": scaling, **fraction}


# --- Windows ----------------------------------------------------------------------------------------------------------


def windows(
    types: Callable[[ConfigReader, int], Sequence[str]] = lambda reader, n: ["sliding_attention"] * n,
    *,
    default: int | None = None,
    has_flag: bool = False,
    keys: str = "sliding_window layer_types",
) -> Column:
    """Return the column of windows.

    Args:
        types: Function (reader, number of layers) -> types of the layers if layer_types is absent; default: all have
            a window.
        default: Window if sliding_window is absent.
        has_flag: Whether windows have an effect only if use_sliding_window is true.
        keys: Keys that are written, besides use_sliding_window.
    """

    def read(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
        has_window = not has_flag or reader.flag("use_sliding_window", default=False)
        layer_types = types(reader, fields["num_layers"])
        return read_windows(reader, layer_types, default_window=default, has_window=has_window)

    def write(config: LanguageModelConfig) -> dict[str, Any]:
        values = write_windows(config)
        flag = {"use_sliding_window": values["sliding_window"] is not None} if has_flag else {}
        return {key: values[key] for key in keys.split()} | flag

    return Column(read, write)


def read_windows(
    reader: ConfigReader, layer_types: Sequence[str], *, default_window: int | None = None, has_window: bool = True
) -> dict[str, Any]:
    """Return the fields of windows; layers of the type "sliding_attention" have one.

    `layer_types` and `default_window` replace absent keys; a null window means none. `has_window` is False if
    sliding_window has no effect. Raises CheckpointError if layers with a window have no size, or their number is wrong.
    """
    window = reader.count("sliding_window", default=default_window if "sliding_window" not in reader.values else None)
    default = layer_types if window and has_window else ["full_attention"] * len(layer_types)
    types = reader.choices("layer_types", known=LAYER_TYPES, default=default)
    if len(types) != len(layer_types):
        received = f"{reader.path} has {len(types)} layer_types"
        raise CheckpointError(f"{received}; expected one for each of {len(layer_types)} layers")
    if "sliding_attention" not in types:
        return {}
    if not (window and has_window):
        raise CheckpointError(f"{reader.path} has layers of the type 'sliding_attention'; expected a sliding_window")
    window += reader.values.get("is_causal") is False  # transformers then counts the tokens of one side
    return {"window": window, "layer_types": tuple(types) if "full_attention" in types else None}


# sliding_window has no effect.
NO_WINDOWS = Column(
    lambda reader, fields: read_windows(reader, ["full_attention"] * fields["num_layers"], has_window=False)
)


def every_nth_full(n: int, *keys: str) -> Callable[[ConfigReader, int], Sequence[str]]:
    """Return the function that `windows` expects for layers of which the nth, 2 nth and so on have no window.

    The first of the keys in config.json that is present replaces n.
    """

    def types(reader: ConfigReader, num_layers: int) -> list[str]:
        step = reader.count(*keys, default=n)
        return ["sliding_attention" if (i + 1) % step else "full_attention" for i in range(num_layers)]

    return types


def without_positions(reader: ConfigReader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the field of layers that have no positions, as they have no window; `windows` returned the others."""
    default = "sliding_attention" if fields.get("window") else "full_attention"
    types = fields.get("layer_types") or [default] * fields["num_layers"]
    return {"layers_without_positions": [i for i, each in enumerate(types) if each == "full_attention"]}


def write_windows(config: LanguageModelConfig | EncoderConfig) -> dict[str, Any]:
    """Return the config.json keys of windows."""
    windows = [config.window_of(layer) for layer in range(config.num_layers)]
    return {
        "sliding_window": config.window - _is_bidirectional(config) if config.window and any(windows) else None,
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }


# --- Special tokens and output ----------------------------------------------------------------------------------------


def read_special_ids(reader: ConfigReader, *, pad_id: int | None = None) -> dict[str, Any]:
    """Return the fields of special tokens; a token that the files do not name is None, and padding is `pad_id`.

    generation_config.json overrides config.json. Of several ends in eos_token_id, the first one is returned.
    """
    bos_id = reader.count("bos_token_id", default=None, at_least=0)
    eos_ids = reader.counts("eos_token_id", default=None, at_least=0)
    return {
        "pad_id": reader.count("pad_token_id", default=pad_id, at_least=0),
        "bos_id": reader.generation.count("bos_token_id", default=bos_id, at_least=0),
        "eos_id": next(iter(reader.generation.counts("eos_token_id", default=eos_ids, at_least=0)), None),
        "suppress_special": reader.generation.flag("suppress_special", default=False),
    }


def _is_tied(reader: ConfigReader) -> bool:
    return reader.flag("tie_word_embeddings", default=reader.model_type not in _UNTIED.split())


def tied(output: str = "lm_head.weight") -> Column:
    """Return the column of the output matrix of an encoder-decoder; see `read_tied`."""
    return Column(
        lambda reader, fields: {"tie_output": read_tied(reader, output)},
        lambda config: {"tie_word_embeddings": config.tie_output},
    )


def read_tied(reader: ConfigReader, output: str = "lm_head.weight") -> bool:
    """Return whether the embedding is the output matrix, whose tensor is the same or absent.

    Raises CheckpointError if it is absent and config.json does not say that the embedding replaces it.
    """
    if not _is_tied(reader) and not has_tensor(reader, output):
        raise CheckpointError(
            f"{reader.path} does not tie the embedding to the output matrix (tie_word_embeddings is false), and the "
            f"checkpoint lacks the tensor {output}; expected the complete checkpoint, or tie_word_embeddings true"
        )
    return output in reader.tied


def read_output(reader: ConfigReader, output: str = "lm_head.weight") -> dict[str, Any]:
    """Return the fields of a language model that its output matrix, is_causal and special tokens determine."""
    has_output = _is_tied(reader) or has_tensor(reader, output) or not _is_base_model(reader)
    return {
        "scale_embeddings": False,
        "tie_output": not has_output or read_tied(reader, output),
        "has_output": has_output,
        "causal": reader.flag("is_causal", default=True),
        "dropout": 0.0,
        **read_special_ids(reader),
    }


def write_output(config: LanguageModelConfig | TransformerConfig) -> dict[str, Any]:
    """Return the config.json keys of `read_output`."""
    values = {"is_causal": False} if _is_bidirectional(config) else {}
    is_tied = config.tie_output and getattr(config, "has_output", True)
    return {"tie_word_embeddings": is_tied, **values, **write_special_ids(config)}


def _is_base_model(reader: ConfigReader) -> bool:
    """Return whether the tensors are those of a base model: their names have no prefix, or config.json says so."""
    name = str((reader.values.get("architectures") or [""])[0])
    is_named = name.endswith("Model") and "Head" not in name  # GPT2LMHeadModel has an output matrix
    return is_named or not any(name.startswith(_PREFIXES) for name in reader.tensors)


def _is_bidirectional(config: Any) -> bool:
    return isinstance(config, LanguageModelConfig) and not config.causal


def write_special_ids(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json keys of special tokens."""
    return {"pad_token_id": config.pad_id, "bos_token_id": config.bos_id, "eos_token_id": config.eos_id}


def read_decoder_ids(reader: ConfigReader, *, start: int | None = None) -> dict[str, Any]:
    """Return the fields of special tokens of an encoder-decoder; its bos_id is the decoder_start_token_id."""
    fields, key = read_special_ids(reader), "decoder_start_token_id"
    default = fields["bos_id"] if start is None else start
    bos_id = reader.generation.count(key, default=reader.count(key, default=default, at_least=0), at_least=0)
    for missing in (key for key, value in ((key, bos_id), ("eos_token_id", fields["eos_id"])) if value is None):
        raise CheckpointError(f"{reader.path} has no key {missing!r}, which an encoder-decoder needs")
    return {**fields, "bos_id": bos_id}


def write_decoder_ids(config: TransformerConfig) -> dict[str, Any]:
    """Return the config.json keys of `read_decoder_ids`."""
    return {"pad_token_id": config.pad_id, "eos_token_id": config.eos_id, "decoder_start_token_id": config.bos_id}


def has_tensor(reader: ConfigReader, endings: str | tuple[str, ...]) -> bool:
    """Return whether the name of a tensor of the checkpoint has this ending, or one of several."""
    return any(name.endswith(endings) for name in reader.tensors)


# --- Classes ----------------------------------------------------------------------------------------------------------


def read_labels(reader: ConfigReader) -> dict[str, Any]:
    """Return the fields of a classifier; config.json may give the number of classes by their names only.

    Raises CheckpointError for a classifier of tokens, whose tensors have the same names.
    """
    if reader.classes is not None:
        return reader.classes
    architectures = reader.values.get("architectures")
    for name in architectures if isinstance(architectures, list) else []:
        if str(name).endswith("ForTokenClassification"):
            raise CheckpointError(f"{reader.path} has a classifier of tokens ({name}); expected one of texts or images")
    names = reader.section("id2label").values
    number = reader.count("num_labels", "_num_labels", default=2, at_least=0)
    if not has_tensor(reader, ("classifier.weight", "classifier.out_proj.weight")):
        return {}
    problem_type = reader.choice("problem_type", known=PROBLEM_TYPES, default=PROBLEM_TYPES[0])
    if not names:
        return {"num_labels": number, "problem_type": problem_type}
    labels = [names.get(str(i)) for i in range(len(names))]
    if not all(isinstance(label, str) for label in labels):
        raise CheckpointError(f"{reader.path} has id2label {names!r:.60}; expected a name for each number from 0")
    own = None if labels == _default_labels(len(labels)) else labels
    return {"num_labels": len(labels), "labels": own, "problem_type": problem_type}


def write_labels(config: EncoderConfig | ImageEncoderConfig) -> dict[str, Any]:
    """Return the config.json keys of the classes: their names, which transformers counts, and the problem type."""
    labels = config.labels or _default_labels(config.num_labels)
    if not labels:
        return {}
    problem_type = {} if config.problem_type == PROBLEM_TYPES[0] else {"problem_type": config.problem_type}
    numbers = {label: i for i, label in enumerate(labels)}
    return {"id2label": {str(i): label for label, i in numbers.items()}, "label2id": numbers, **problem_type}


LABELS = Column(lambda reader, fields: read_labels(reader), write_labels)


def _default_labels(count: int) -> list[str]:
    return [f"LABEL_{i}" for i in range(count)]
