"""`Table`: the config.json of one model type, read and written by the same description."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

from xformer.families.config_reader import REQUIRED, ConfigReader
from xformer.families.family import Family
from xformer.families.layouts import Layout
from xformer.models.base import BaseModel

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
        config_class: Class of the configuration.
        keys: {field: key}, read and written.
        unwritten: The same for keys that are only read, since transformers ignores them or writes their default.
        columns: What is not one key for one field, in this order.
        fixed: Fields that are the same in all models, or functions of the others.
        required: {key: its only value, or a function of the fields that returns it}.
        skipped: Keys that may have any value.
        written: {key: value, or function of the configuration} that are written, too.
    """

    model_type: str
    architecture: Any = ""
    config_class: Any
    keys: dict[str, Key] = field(default_factory=dict)
    unwritten: dict[str, Key] = field(default_factory=dict)
    columns: tuple[Column, ...] = ()
    fixed: dict[str, Any] = field(default_factory=dict)
    required: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""
    written: dict[str, Any] = field(default_factory=dict)

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
        return self.config_class(**fields)

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


def register_tables(*tables: Table, model: type[BaseModel], tensors: TensorTable, **options: Any) -> None:
    """Register a family whose types have these tables; for the other arguments, see `Family`."""
    types = {table.model_type: table for table in tables}
    Family(
        model_types=tuple(types),
        model=model,
        tensors=tensors,
        read_config=lambda reader: types[reader.model_type].read_config(reader),
        write_config=lambda config, model_type: types[model_type].write_config(config),
        **options,
    ).register()
