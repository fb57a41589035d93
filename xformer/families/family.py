"""`Family`: the translation of config.json and the table of tensors of similar public checkpoints.

`ConfigReader` reads config.json, where a key that is neither read nor known to be harmless is an error; a `Table` reads
and writes the config.json of one model type by the same description.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from xformer.errors import CheckpointError, nearest_hint
from xformer.families.layouts import Layout
from xformer.models.base import BaseModel

FAMILIES: dict[str, Family] = {}


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Description of checkpoints in the Hugging Face format that share config keys and tensor names.

    The same table reads and writes: every parameter of the model and every tensor of the file must appear in it.

    Attributes:
        model_types: Values of `model_type` in config.json. Of several that compute the same, the first one is written.
        model: Class of the model.
        tensors: {name of a tensor: its layout}, where "{i}" in names stands for the number of a layer and "{e}" for
            that of an expert; or a function that returns this table for a configuration.
        read_config: Function (ConfigReader) -> configuration of the model.
        write_config: Function (configuration, model type) -> values of config.json. It raises ConfigError for a
            configuration that the family does not support. None if the family cannot be written.
        prefix: Prefix of tensor names that some files omit, e.g. "transformer.".
        tied: Tensors that equal another one in tied models: {name: name of the other}.
        ignored: Patterns (fnmatch) of the names of constant tensors.
        renamed: Replacements in tensor names of old files: {old: new}.
    """

    model_types: tuple[str, ...]
    model: type[BaseModel]
    tensors: Mapping[str, Layout] | Callable[[Any], Mapping[str, Layout]]
    read_config: Callable[[ConfigReader], Any]
    write_config: Callable[[Any, str], dict[str, Any]] | None = None
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def register(self) -> Family:
        """Add the family to those that `load_pretrained` and `save_pretrained` support, and return it."""
        FAMILIES.update(dict.fromkeys(self.model_types, self))
        return self

    def has_experts(self, model: BaseModel) -> bool:
        """Return whether the family has tensors of experts."""
        return any("experts" in name for name in value_of(self.tensors, model.config))

    def layouts_of(
        self, model: BaseModel, names: Sequence[str] | None = None, *, is_complete: bool = True
    ) -> dict[str, tuple[Layout, tuple[str, ...]]]:
        """Return {tensor: (layout, names of its parameters)} for the parameters of a model, or for those named.

        If it `is_complete`, a parameter without a tensor raises CheckpointError.
        """
        names = [name for name, _ in model.named_parameters()] if names is None else names
        layouts, without_tensor = {}, set(names)
        for tensor, layout in value_of(self.tensors, model.config).items():
            for numbers in _numbers(layout.parameters[0], names):
                parameters = tuple(name.format_map(numbers) for name in layout.parameters)
                layouts[tensor.format_map(numbers)] = layout, parameters
                without_tensor -= set(parameters)
        if without_tensor and is_complete:
            received = f"parameter {min(without_tensor)} has no tensor in the family {self.model_types[0]}"
            raise CheckpointError(f"{received}; expected a configuration that the family supports")
        return layouts

    def canonical_name(self, tensor: str, known: Collection[str]) -> str:
        """Return the name in `known` of a tensor of a file; an unknown tensor keeps its name."""
        for old, new in self.renamed.items():
            tensor = tensor.replace(old, new)
        candidates = (tensor, f"{self.prefix}{tensor}", tensor.removeprefix(self.prefix))
        return next((name for name in candidates if name in known), tensor)

    def is_ignored(self, tensor: str) -> bool:
        """Return whether a tensor is a constant that the model computes itself."""
        return any(fnmatch.fnmatchcase(tensor, pattern) for pattern in self.ignored)


def _numbers(pattern: str, names: Sequence[str]) -> list[dict[str, str]]:
    """Return the numbers "i" and "e" for which the pattern is one of the names; [{}] for a name without them."""
    expression = re.compile(re.sub(r"\\{([ie])\\}", r"(?P<\1>\\d+)", re.escape(pattern)))
    return [match.groupdict() for match in filter(None, map(expression.fullmatch, names))]


def register(family: Family) -> Family:
    """Add a family to those that `load_pretrained` and `save_pretrained` support, and return it."""
    return family.register()


def family_of(model_type: Any, path: Any) -> Family:
    """Return the family of a model type.

    Raises:
        CheckpointError: If no family has this model type.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(f"{path} has model_type {model_type!r}; {nearest_hint(str(model_type), FAMILIES)}")
    return FAMILIES[model_type]


# --- Reading config.json ----------------------------------------------------------------------------------------------


REQUIRED: Any = object()
# Keys that do not change what a model computes: provenance, initialization, outputs of torch modules, generation
# defaults of old files (generation_config.json has them now), labels, tying (which the tensors show) and what pipelines
# read.
_HARMLESS = """
_attn_implementation_autoset _name_or_path _num_labels architectures chunk_size_feed_forward cross_attention_hidden_size
decoder do_sample dtype diversity_penalty early_stopping encoder encoder_no_repeat_ngram_size
exponential_decay_length_penalty finetuning_task gradient_checkpointing id2label init_std initializer_factor
initializer_range is_encoder_decoder keys_to_ignore_at_inference label2id length_penalty max_length
min_length model_type no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
output_attentions output_hidden_states output_past output_scores prefix pretraining_tp problem_type pruned_heads
remove_invalid_values repetition_penalty return_dict return_dict_in_generate sbert_ce_default_activation_function
sentence_transformers sep_token_id task_specific_params temperature tf_legacy_loss tie_word_embeddings tokenizer_class
top_k top_p torch_dtype torchscript transformers_version transformers.js_config typical_p use_bfloat16 use_cache
"""
# Keys that may change what a model computes, and whose default is false or 0 in transformers, also in older versions.
_FALSE = """
_flash_attn_2_enabled add_cross_attention is_decoder rope_interleaved tie_encoder_decoder use_mrope
_remove_final_layer_norm add_bias_logits add_final_layer_norm alibi apply_residual_connection_post_layernorm
do_blenderbot_90_layernorm extra_layer_norm flash_attn force_bos_token_to_be_generated is_composition is_llama_config
new_decoder_architecture normalize_before parallel_residual qk_layernorm replacing_rate reorder_and_upcast_attn
save_step scale_attn_by_inverse_layer_idx shared_input_output_embedding sinusoidal_pos_embds slow_but_exact
static_position_embeddings torch_compile use_flash_attn use_moe use_mup use_return_dict use_sliding_window
use_stable_embedding
"""
_MAX_COUNT, _MAX_NUMBER = 2**24, 1e30  # far above the values of any model


class ConfigReader:
    """The values of a config.json, and the names of the checkpoint's tensors.

    `count`, `counts`, `number`, `flag`, `choice`, `choices` and `section` return the value of the first of their keys
    that is present and not null, or the default. They raise CheckpointError if the value has another type or size, or
    is absent without a default.

    Args:
        values: The values by key.
        path: Path of the file, for errors.
        tensors: Names of the tensors of the checkpoint.
        tied: Names in `Family.tied` whose tensors are absent or equal the other one.
        prefix: Prefix of the keys in errors, e.g. "rope_parameters.".

    Attributes:
        generation: Reader of generation_config.json; the same as this one if there is no such file.
        classes: Fields of a classifier that the model gets in place of the heads of the checkpoint; None to keep them.
    """

    def __init__(
        self, values: dict[str, Any], path: Path, tensors: Collection[str], tied: Collection[str], prefix: str = ""
    ) -> None:
        self.path, self.tensors, self.tied = path, tensors, tied
        self.model_type = str(values.get("model_type"))
        self.values = dict(values)
        self.generation = self
        self.classes: dict[str, Any] | None = None
        self._prefix = prefix
        # Dropout changes the training only; loaded models have none.
        self._unread = {key for key in values if "drop" not in key} - set(_HARMLESS.split())

    def count(self, *keys: str, default: Any = REQUIRED, at_least: int = 1) -> Any:
        """Return an integer, e.g. a size or the id of a token."""
        expected = f"an integer from {at_least} to {_MAX_COUNT}"
        return self._read(keys, default, lambda value: _is_count(value, at_least), expected)

    def counts(self, *keys: str, default: Any = REQUIRED, at_least: int = 1) -> list[int]:
        """Return a list of integers; a single integer gives a list of length 1, and null an empty list."""

        def is_valid(value: Any) -> bool:
            return all(_is_count(item, at_least) for item in (value if isinstance(value, list) else [value]))

        value = self._read(keys, default, is_valid, f"integers from {at_least} to {_MAX_COUNT}")
        return value if isinstance(value, list) else [] if value is None else [value]

    def number(self, *keys: str, default: Any = REQUIRED) -> Any:
        """Return a positive float."""
        value = self._read(keys, default, _is_positive, f"a number above 0 and at most {_MAX_NUMBER:g}")
        return None if value is None else float(value)

    def flag(self, *keys: str, default: Any = REQUIRED) -> bool:
        """Return a boolean."""
        return bool(self._read(keys, default, lambda value: isinstance(value, bool), "true or false"))

    def choice(self, *keys: str, known: Collection[str], default: Any = REQUIRED) -> str:
        """Return one of the known strings."""
        expected = f"one of {', '.join(known)}"
        return str(self._read(keys, default, lambda value: isinstance(value, str) and value in known, expected))

    def choices(self, *keys: str, known: Collection[str], default: Any = REQUIRED) -> list[str]:
        """Return a list of known strings."""

        def is_valid(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, str) and item in known for item in value)

        return list(self._read(keys, default, is_valid, f"a list of {', '.join(known)}"))

    def section(self, *keys: str) -> ConfigReader:
        """Return a reader of a nested JSON object, empty if it is absent."""
        values = self._read(keys, {}, lambda value: isinstance(value, dict), "a JSON object")
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        return ConfigReader(values, self.path, self.tensors, self.tied, f"{self._prefix}{key}.")

    def _read(self, keys: Collection[str], default: Any, is_valid: Callable[[Any], bool], expected: str) -> Any:
        self._unread -= set(keys)
        for key in keys:
            if (value := self.values.get(key)) is not None:
                if not is_valid(value):
                    raise CheckpointError(f"{self.path} has {self._prefix}{key} {value!r:.60}; expected {expected}")
                return value
        if default is REQUIRED:
            raise CheckpointError(f"{self.path} has no key {next(iter(keys))!r}")
        return default

    def require(self, key: str, *accepted: Any) -> None:
        """Raise CheckpointError if a key has a value other than the accepted ones; null is accepted."""
        value = self.values.get(key)
        self._unread.discard(key)
        if value is not None and value not in accepted:
            expected = " or ".join(map(repr, accepted))
            raise CheckpointError(f"{self.path} has {key} {value!r:.60}; expected {expected}")

    def skip(self, *keys: str) -> None:
        """Accept any value of keys that do not change what the model computes."""
        self._unread -= set(keys)

    def finish(self) -> None:
        """Raise CheckpointError for a key that was not read, unless it is null, or false where that is the default."""
        off = {key for key in _FALSE.split() if self.values.get(key) == 0}
        for key in sorted(key for key in self._unread - off if self.values[key] is not None):
            received = f"{self.path} has the key {key!r} ({self.values[key]!r:.60}), which xformer does not know"
            hint = "without it, the model could give wrong outputs"
            raise CheckpointError(f"{received} in models of type {self.model_type}; {hint}")


def _is_count(value: Any, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= _MAX_COUNT


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _MAX_NUMBER


# --- Tables of config.json --------------------------------------------------------------------------------------------


Tensors = dict[str, Layout]  # {name of a tensor: its layout}
TensorTable = Tensors | Callable[[Any], Tensors]  # it may depend on the configuration


@dataclass(frozen=True)
class Key:
    """A key of config.json, which has the value of a field.

    Attributes:
        names: The key, and after spaces other names of it in old files.
        default: Value of an absent key, or a function of the fields before it.
        kind: Type of the value: float, bool, or an integer that is a count; default that of `default`.
        read: Function of the value that returns the field.
        write: Function of the configuration that returns the value; default the field.
    """

    names: str
    default: Any = REQUIRED
    kind: type | None = None
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] | None = None


class Column(NamedTuple):
    """Keys of config.json that several fields share, or that need a check.

    Attributes:
        read: Function (reader, fields that are known so far) -> further fields.
        write: Function (configuration) -> values by key.
    """

    read: Callable[[ConfigReader, dict[str, Any]], Mapping[str, Any]] = lambda reader, fields: {}
    write: Callable[[Any], Mapping[str, Any]] = lambda config: {}


@dataclass(frozen=True, kw_only=True)
class Table:
    """The config.json of one model type, in both directions.

    Attributes:
        model_type: The type.
        architecture: Name of the class in transformers, or a function of the configuration; "" for a section. Of a
            `Decoder` or an `EncoderTable` the first part of the name; "" for the type in CamelCase.
        model: Class of the model.
        keys: {field: key}, read and written.
        unwritten: The same for keys that are only read, since transformers ignores them or writes their default.
        columns: What is not one key for one field, in this order.
        fixed: Fields that are the same in all models, or functions of the others.
        required: {key: its only value, or a function of the fields that returns it}.
        skipped: Keys that may have any value.
        written: {key: value, or function of the configuration} that are written, too.
        tensors: As in `Family`; so are `prefix`, `tied`, `ignored` and `renamed`.
    """

    model_type: str
    architecture: Any = ""
    model: type[BaseModel]
    keys: dict[str, Key] = field(default_factory=dict)
    unwritten: dict[str, Key] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""
    written: dict[str, Any] = field(default_factory=dict)
    tensors: TensorTable = field(default_factory=dict)
    prefix: str = ""
    tied: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)

    def register(self, *others: Table) -> None:
        """Register the family of this type and of others that have the same tensors."""
        types = {table.model_type: table for table in (self, *others)}
        Family(
            model_types=tuple(types),
            model=self.model,
            read_config=lambda reader: types[reader.model_type].read_config(reader),
            write_config=lambda config, model_type: types[model_type].write_config(config),
            **self.of_family(),
        ).register()

    def of_family(self) -> dict[str, Any]:
        """Return the fields that describe the tensors of the family."""
        return {name: getattr(self, name) for name in ("tensors", "prefix", "tied", "ignored", "renamed")}

    def variant(self, model_type: str, architecture: str = "", **changes: Any) -> Self:
        """Return the table of a similar type."""
        return replace(self, model_type=model_type, architecture=architecture, **changes)

    def class_name(self, config: Any, head: str = "") -> str:
        """Return the name of the class in transformers, given the last part of it that depends on the configuration."""
        if not head:
            return str(value_of(self.architecture, config))
        return f"{self.architecture or ''.join(map(str.capitalize, self.model_type.split('_')))}{head}"

    def all_columns(self) -> tuple[Column, ...]:
        """Return the columns, with those that all types of a kind have."""
        return self.columns

    def read_config(self, reader: ConfigReader) -> Any:
        """Translate config.json into a configuration."""
        reader.skip(*self.skipped.split())
        methods: dict[type, Callable[..., Any]] = {bool: reader.flag, float: reader.number}
        fields: dict[str, Any] = {}
        for name, key in {**self.keys, **self.unwritten}.items():
            default = value_of(key.default, fields)
            read: Callable[..., Any] = methods.get(key.kind or type(default), reader.count)
            fields[name] = key.read(read(*key.names.split(), default=default))
        for column in self.all_columns():
            fields |= column.read(reader, fields)
        for required, value in self.required.items():
            reader.require(required, value_of(value, fields))
        fields |= {name: value_of(value, fields) for name, value in self.fixed.items()}
        return self.model.config_class(**fields)

    def write_config(self, config: Any) -> dict[str, Any]:
        """Translate a configuration into the values of config.json; raise ConfigError if a column does not fit."""
        architecture = self.class_name(config)
        values: dict[str, Any] = {"architectures": [architecture]} if architecture else {}
        values["model_type"] = self.model_type
        for name, key in self.keys.items():
            values[key.names.split()[0]] = getattr(config, name) if key.write is None else key.write(config)
        for column in self.all_columns():
            values |= column.write(config)
        return values | {key: value_of(value, config) for key, value in self.written.items()}


def value_of(value: Any, known: Any) -> Any:
    """Return a value of a table, which may be a function of what is known: the fields, or the configuration."""
    return value(known) if callable(value) else value
