"""Configurations: frozen dataclasses whose fields carry their help text, range and choices.

`option` declares a field, which the docstring of the class describes (`python -OO` has none, and no help of options).
`Config` checks every value when a configuration is made. The options of the command line and the tables of the
reference documentation are generated from the same metadata.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, ClassVar, Self, dataclass_transform

import numpy as np

from xformer.errors import ConfigError, DataError, Function, describe_type, nearest_hint

_TYPES: dict[str, tuple[Any, str]] = {
    "int": (int, "an integer"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "str": (str, "a string"),
    "tuple[str, ...]": ((tuple, list), "a list of strings"),
    "dict[str, Any]": (dict, "a table"),
}
_BOUNDS: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    "at_least": (operator.ge, "at least {}"),
    "above": (operator.gt, "a number above {}"),
    "at_most": (operator.le, "at most {}"),
    "below": (operator.lt, "a number below {}"),
}
_ARGUMENT = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)  # of a docstring, and its description


def option(
    help: str = "",
    *,
    default: Any = dataclasses.MISSING,
    choices: Collection[str] | None = None,
    within: tuple[float, float] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    metavar: str = "",
    panel: str = "",
) -> Any:
    """Declare a field of a `Config`.

    Args:
        help: Description, shown by `--help` and in the reference; default what the "Args" of the docstring of the
            class say.
        default: Default value. A field without one is required.
        choices: Values that a string may have.
        within: Smallest and largest value.
        at_least: Smallest value.
        above: Exclusive lower bound.
        at_most: Largest value; math.inf allows infinity.
        below: Exclusive upper bound.
        metavar: What `--help` shows as the value, in place of its type.
        panel: Heading under which `--help` lists this option and those after it, up to the next one with a panel.
    """
    at_least, at_most = within or (at_least, at_most)
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {"help": help, "metavar": metavar, "panel": panel, "choices": choices, "bounds": bounds}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option, dataclasses.field))
class Config:
    """Base class of configurations: subclasses become frozen, keyword-only dataclasses whose values are checked.

    NumPy numbers and booleans are converted to those of Python, and lists to tuples. A class that checks more than
    single values defines `_check`, which need not call that of its base.

    Raises:
        ConfigError: For an unknown field (with the nearest known one) or an invalid value, naming the field.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # of the subclasses, for type checkers

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # The methods that dataclass would compile for a hundred fields take a tenth of the time to start.
        dataclass(kw_only=True, init=False, repr=False, eq=False)(cls)
        arguments = inspect.cleandoc(cls.__doc__ or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
        own = inspect.get_annotations(cls)  # a base class describes its fields
        for name, text in _ARGUMENT.findall(arguments):
            if name in own:
                field = cls.__dataclass_fields__[name]
                field.metadata = MappingProxyType({**field.metadata, "help": " ".join(text.split())})
        kind, empty = inspect.Parameter.KEYWORD_ONLY, {dataclasses.MISSING: inspect.Parameter.empty}
        cls.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(each.name, kind, default=empty.get(each.default, each.default), annotation=each.type)
                for each in dataclasses.fields(cls)
            ]
        )

    def __init__(self, *args: Any, **values: Any) -> None:
        name = type(self).__name__
        if args:
            usage = getattr(self, "_usage", "") or f"use {name}({field_names(self)[0]}=...)"
            raise ConfigError(f"{name} takes keyword arguments only; {usage}")
        _check_names(self, values, name)
        vars(self).update({each.name: values.get(each.name, each.default) for each in dataclasses.fields(self)})
        self.__post_init__()

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if type(self) is type(other) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __setattr__(self, name: str, value: Any) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(type(self)):
            value = getattr(self, field.name)
            if value is field.default:
                continue
            if isinstance(value, np.generic):  # as Python values they can be written to JSON
                value = value.item()
            elif isinstance(value, list) and _type_name(field).startswith("tuple"):
                value = tuple(value)
            vars(self)[field.name] = value
            check_value(field, value)
        for cls in reversed(type(self).__mro__):  # those of a subclass may rely on those of its bases
            if "_check" in vars(cls):
                vars(cls)["_check"](self)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-serializable dictionary."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Any, name: str = "") -> Self:
        """Make a configuration from a dictionary.

        Args:
            values: Values by field name.
            name: Name of the source in errors, e.g. "[training] of recipe.toml".

        Raises:
            ConfigError: For unknown or missing keys and invalid values.
        """
        name = name or cls.__name__
        if not isinstance(values, dict):
            raise ConfigError(f"{name} is {describe_type(values)}; expected a table of names and values")
        _check_names(cls, values, name)
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error


def with_fields(function: Callable[..., Any], config: type[Config]) -> inspect.Signature:
    """Return the signature of a method whose `**options` are the fields of a configuration."""
    _, *own, _ = inspect.signature(function).parameters.values()
    return inspect.Signature([*own, *inspect.signature(config).parameters.values()])


def with_options(config: type[Config]) -> Callable[[Function], Function]:
    """Let a method, among whose `**options` are the fields of a configuration, show them in its signature."""

    def decorate(method: Function) -> Function:
        signature = inspect.signature(method)
        *own, others = signature.parameters.values()
        parameters = [*own, *inspect.signature(config).parameters.values(), others]
        method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return method

    return decorate


def with_parameters_of(function: Any) -> Callable[[Function], Function]:
    """Let a function that only passes its arguments on show the signature of another function, or of a class."""

    def decorate(decorated: Function) -> Function:
        result = inspect.signature(decorated).return_annotation
        decorated.__signature__ = inspect.signature(function).replace(return_annotation=result)  # type: ignore[attr-defined]
        return decorated

    return decorate


def field_names(config: Any) -> list[str]:
    """Return the names of a configuration's fields, in order."""
    return [field.name for field in dataclasses.fields(config)]


def take_options(config: type[Config], settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a configuration from settings, and return them."""
    return {name: settings.pop(name) for name in field_names(config) if name in settings}


def options_of(config: type[Config]) -> Iterator[tuple[str, str, str, dataclasses.Field[Any]]]:
    """Yield (name, type without None, panel, field) for the fields of a configuration, in order."""
    panel = ""
    for field in dataclasses.fields(config):
        panel = field.metadata["panel"] or panel
        yield field.name, _type_name(field).removesuffix(" | None"), panel, field


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested dictionaries as one, with names such as "recipe.training.seed"."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= dotted(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def check_keys(keys: Iterable[str], known: Collection[str], name: str, hints: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError for the first unknown key, suggesting the nearest known one or what `hints` has for it."""
    for key in keys:
        if key not in known:
            raise ConfigError(f"unknown key {key!r} in {name}; {nearest_hint(key, known, hints)}")


def check_heads(d_model: int, num_heads: int, num_key_value_heads: int, head_dim: int | None = None) -> None:
    """Raise ConfigError unless num_heads divides d_model (without a head_dim) and num_key_value_heads num_heads."""
    for name, value in (("d_model", d_model), ("num_heads", num_heads), ("num_key_value_heads", num_key_value_heads)):
        check_count(name, value)
    if head_dim is not None:
        check_count("head_dim", head_dim)
    if head_dim is None and d_model % num_heads:
        hint = f"choose e.g. d_model {num_heads * max(1, round(d_model / num_heads))} or another num_heads"
        raise ConfigError(f"d_model {d_model} is not divisible by num_heads {num_heads}; {hint}")
    if num_heads % num_key_value_heads:
        received = f"num_heads {num_heads} is not divisible by num_key_value_heads {num_key_value_heads}"
        raise ConfigError(f"{received}; expected groups of query heads of equal size")


def check_count(name: str, value: Any, at_least: int = 1) -> None:
    """Raise ConfigError unless a value is an integer of at least 1, or another minimum."""
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < at_least:
        raise ConfigError(f"{name} is {value!r}; expected an integer of at least {at_least}")


def check_number(name: str, value: Any, **bounds: float) -> None:
    """Raise ConfigError unless a value is a finite number within bounds, which have the names of those of `option`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not _is_valid(float(value), {"bounds": bounds}):
        expected = describe_values({"bounds": bounds}) or "a finite number"
        kind = "a number of " if expected.startswith("at ") else ""
        raise ConfigError(f"{name} is {value!r}; expected {kind}{expected}")


def check_bool(name: str, value: Any) -> bool:
    """Return True or False, also for a bool of NumPy; raise ConfigError for anything else."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{name} is {value!r}; expected True or False")
    return bool(value)


def contradiction(config: Any, names: str, expected: str) -> ConfigError:
    """Return the error for fields whose values do not go together: "copy is true and share_embeddings false; ...".

    Args:
        config: The configuration.
        names: Names of the fields, separated by spaces.
        expected: What was expected.
    """
    values = [(name, getattr(config, name)) for name in names.split()]
    shown = [f"{name} {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in values]
    received = " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1]))).replace(" ", " is ", 1)
    return ConfigError(f"{received}; expected {expected}")


def integers(name: str, values: Any) -> list[int]:
    """Return integers, such as token ids, as a list; raise DataError for anything else."""
    try:
        if not isinstance(values, bytes | bytearray):
            return [operator.index(value) for value in values]
    except TypeError as error:
        raise DataError(f"{name} is {values!r}; expected a list of integers") from error
    raise DataError(f"{name} is {values!r:.80}; expected a list of integers")


def _check_names(config: Any, values: dict[str, Any], name: str) -> None:
    check_keys(values, field_names(config), name, getattr(config, "_hints", None))
    missing = [f.name for f in dataclasses.fields(config) if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ConfigError(f"{name} requires {', '.join(missing)}")


def check_value(field: dataclasses.Field[Any], value: Any, name: str = "") -> None:
    """Raise ConfigError unless a value fits the type, the choices and the bounds of a field.

    Args:
        field: A field that `option` declared.
        value: The value.
        name: Name of the value in the error; default the field's.
    """
    annotation, metadata = _type_name(field), field.metadata
    if value is None and annotation.endswith("| None"):
        return
    cls, description = _TYPES.get(annotation.removesuffix(" | None"), (object, ""))
    expected = describe_values(metadata) or description
    if isinstance(value, int) and abs(value) >> 63:
        raise ConfigError(f"{name or field.name} is {value}; expected a number below 2^63")
    has_type = isinstance(value, cls) and (not isinstance(value, bool) or cls in (bool, object))
    has_type = has_type and (cls != (tuple, list) or all(isinstance(each, str) for each in value))
    if not has_type and expected.startswith("at "):
        expected = f"{description} of {expected}"
    if not has_type or not _is_valid(value, metadata):
        raise ConfigError(f"{name or field.name} is {value!r}; expected {expected}")


def _type_name(field: dataclasses.Field[Any]) -> str:
    name = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    return "str" if field.metadata.get("choices") and not name.endswith("| None") else name  # of a Literal


def _is_valid(value: Any, metadata: Any) -> bool:
    choices = metadata.get("choices")
    if choices is not None and value not in choices:
        return False
    bounds = metadata.get("bounds", {})
    if isinstance(value, float) and not math.isfinite(value) and value != bounds.get("at_most"):
        return False
    return all(bound is None or _BOUNDS[name][0](value, bound) for name, bound in bounds.items())


def describe_values(metadata: Any) -> str:
    """Describe the valid values, e.g. "a number in [0, 1)" or "one of 'bpe', 'words'"."""
    if metadata.get("choices") is not None:
        return f"one of {', '.join(map(repr, metadata['choices']))}"
    bounds = {name: bound for name, bound in metadata.get("bounds", {}).items() if bound not in (None, math.inf)}
    if len(bounds) == 2:
        (low_name, low), (high_name, high) = bounds.items()
        left, right = "[" if low_name == "at_least" else "(", "]" if high_name == "at_most" else ")"
        return f"a number in {left}{low:g}, {high:g}{right}"
    return "".join(_BOUNDS[name][1].format(f"{bound:g}") for name, bound in bounds.items())
