"""`Family`: the translation of config.json and the table of tensors of similar public checkpoints."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xformer.errors import CheckpointError, nearest_hint
from xformer.families.config_reader import ConfigReader
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
        return any("experts" in name for name in self._table(model))

    def _table(self, model: BaseModel) -> Mapping[str, Layout]:
        return self.tensors(model.config) if callable(self.tensors) else self.tensors

    def layouts_of(
        self, model: BaseModel, names: Sequence[str] | None = None, *, is_complete: bool = True
    ) -> dict[str, tuple[Layout, tuple[str, ...]]]:
        """Return {tensor: (layout, names of its parameters)} for the parameters of a model, or for those named.

        If it `is_complete`, a parameter without a tensor raises CheckpointError.
        """
        names = [name for name, _ in model.named_parameters()] if names is None else names
        layouts, without_tensor = {}, set(names)
        for tensor, layout in self._table(model).items():
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
