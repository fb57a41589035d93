"""Recipes: everything a training run is told, as one TOML file: the task, and three tables."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from xformer.config import check_keys
from xformer.errors import ConfigError
from xformer.models import LanguageModelConfig, TransformerConfig
from xformer.models.config import ModelConfig
from xformer.runs.config import (
    LanguageModelSettings,
    LoopSettings,
    TextTokenizerSettings,
    TokenizerSettings,
    TrainingSettings,
    check_setting,
)
from xformer.training.schedules import schedule

_KINDS: dict[str, Any] = {"int": int, "float": int | float, "str": str, "bool": bool}
# Models that a CPU trains in half an hour or so; the configurations' own defaults are those of the paper.
_SMALL_MODEL = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_encoder_layers": 3, "num_decoder_layers": 3}
_SMALL_LANGUAGE_MODEL = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_layers": 4}


class TaskKind(NamedTuple):
    """What the tables of a recipe hold, by task.

    model: the configuration that [model] gives fields of; not_in_recipes: those that the tokenizers decide;
    small: its defaults; defaults: those of the other tables, where they differ from the settings' own.
    """

    model: type[ModelConfig]
    not_in_recipes: frozenset[str]
    small: dict[str, Any]
    tokenizer: type[Any]
    training: type[LoopSettings]
    defaults: dict[str, dict[str, Any]]


_SPECIAL = frozenset({"pad_id", "bos_id", "eos_id"})
_OF_PAIRS = _SPECIAL | {"source_vocab_size", "target_vocab_size", "share_embeddings"}
_TRANSLATION = TaskKind(TransformerConfig, _OF_PAIRS, _SMALL_MODEL, TokenizerSettings, TrainingSettings, {})
TASKS = {
    "translation": _TRANSLATION,
    "summarization": _TRANSLATION._replace(
        defaults={"tokenizer": {"documents": True}, "training": {"truncation": "cut"}}
    ),
    "language_modeling": TaskKind(
        LanguageModelConfig,
        _SPECIAL | {"vocab_size"},
        _SMALL_LANGUAGE_MODEL,
        TextTokenizerSettings,
        LanguageModelSettings,
        {},
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A task, and the tables [model], [tokenizer] and [training].

    task: "translation", "summarization", whose sources are documents, cut to the limit, by default, or
    "language_modeling"
    model: fields of TransformerConfig; by default 3+3 layers, d_model 256, 4 heads, d_ff 1024. For language models
    those of LanguageModelConfig; by default 4 layers of that size. Vocabulary sizes come from the tokenizer.
    tokenizer, training: TokenizerSettings and TrainingSettings, or for language models TextTokenizerSettings and
    LanguageModelSettings.
    """

    task: str = "translation"
    model: dict[str, Any] = field(default_factory=lambda: dict(_SMALL_MODEL))
    tokenizer: Any = field(default_factory=TokenizerSettings)
    training: Any = field(default_factory=TrainingSettings)

    @classmethod
    def from_dict(cls, tables: dict[str, Any], where: str = "the recipe") -> Recipe:
        """Check every key and make a recipe; raises ConfigError, suggesting the nearest key for an unknown one."""
        tables = dict(tables)
        task = tables.pop("task", "translation")
        if task not in TASKS:
            raise ConfigError(f"task in {where} is {task!r}; expected one of {', '.join(TASKS)}")
        kind = TASKS[task]
        for name, table in tables.items():
            _check_place(name, kind, where)
            check_keys([name], {"task", "model", "tokenizer", "training"}, where)
            if not isinstance(table, dict):
                raise ConfigError(f"{name!r} in {where} is {table!r}; expected a table [{name}]")
        for name, defaults in kind.defaults.items():
            tables[name] = defaults | tables.get(name, {})
        model = kind.small | tables.get("model", {})
        config = _check_model(kind, model, tables.get("tokenizer", {}), where)
        tokenizer = _settings(kind.tokenizer, tables.get("tokenizer", {}), f"[tokenizer] of {where}")
        training = _settings(kind.training, tables.get("training", {}), f"[training] of {where}")
        with error_context(f"[training] of {where}"):
            schedule(training.schedule, **training.schedule_settings(config.d_model))
            _check_positions(config, training)
        return cls(task, model, tokenizer, training)

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe file; raises ConfigError when it is missing, not TOML, or holds an unknown key."""
        return cls.from_dict(read_tables(path), str(path))

    def to_dict(self) -> dict[str, Any]:
        """The tables as JSON-ready dictionaries."""
        return {
            "task": self.task,
            "model": self.model,
            "tokenizer": dataclasses.asdict(self.tokenizer),
            "training": dataclasses.asdict(self.training),
        }

    def with_training(self, **changes: Any) -> Recipe:
        """The recipe with some training settings changed; None leaves a setting as it is."""
        given = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, training=dataclasses.replace(self.training, **given))


def read_tables(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the tables of a recipe file as they stand; raises ConfigError when it is missing or not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror or error}; check the path") from error
    except ValueError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from error


@contextlib.contextmanager
def error_context(place: str) -> Iterator[None]:
    """Name the place in the message of a ConfigError that is raised inside."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from error


def _check_model(kind: TaskKind, model: dict[str, Any], tokenizer: dict[str, Any], where: str) -> ModelConfig:
    """The configuration that a table makes, with vocabularies of an arbitrary size; raises ConfigError."""
    for key in model:
        check_keys([key], {f.name for f in dataclasses.fields(kind.model)} - kind.not_in_recipes, f"[model] of {where}")
    sizes: dict[str, Any] = {name: 8 for name in kind.not_in_recipes if name.endswith("vocab_size")}
    if "share_embeddings" in kind.not_in_recipes:
        sizes["share_embeddings"] = bool(tokenizer.get("joint", True))
    with error_context(f"[model] of {where}"):
        if model.get("num_decoder_layers") == 0:
            raise ConfigError("num_decoder_layers is 0; expected at least 1, to write text with")
        if model.get("copy") and sizes.get("share_embeddings") is False:
            raise ConfigError("copy is true: source tokens must be target tokens, too; set joint = true in [tokenizer]")
        return kind.model(**sizes, **model)


def _check_place(name: str, kind: TaskKind, where: str) -> None:
    """Raise ConfigError for a key before the tables that belongs into one, or some, of them."""
    kinds = {"model": kind.model, "tokenizer": kind.tokenizer, "training": kind.training}
    homes = [f"[{table}]" for table, each in kinds.items() if name in {f.name for f in dataclasses.fields(each)}]
    if homes and name not in kinds and name not in kind.not_in_recipes:
        raise ConfigError(f"{name!r} in {where} stands outside the tables; expected it under {' or '.join(homes)}")


def _check_positions(config: ModelConfig, training: Any) -> None:
    """Learned positions must reach to the end of a window of text, or of the longest text with its end."""
    name = "context_length" if hasattr(training, "context_length") else "max_length"
    length = getattr(training, name)
    most = config.max_positions - (name == "max_length")
    if config.positions == "learned" and length > most:
        raise ConfigError(
            f"{name} is {length}; expected at most {most}, since positions are learned up to max_positions "
            f"{config.max_positions}; lower it, or raise max_positions"
        )


def _settings(kind: type[Any], values: dict[str, Any], where: str) -> Any:
    """Make settings of a dataclass from a table, checking keys and kinds of values."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in values.items():
        check_keys([key], set(fields), where)
        wanted = str(fields[key].type)
        if value is None and wanted.endswith("| None"):
            continue  # a recipe that was saved as JSON
        wanted = wanted.removesuffix(" | None")
        if not isinstance(value, _KINDS[wanted]) or (isinstance(value, bool) and wanted != "bool"):
            if wanted == "str":
                check_setting(key, value, f"{key} in {where}")  # names the choices, where there are some
            raise ConfigError(f"{key} in {where} is {value!r}; expected a value of type {wanted}")
    with error_context(where):
        return kind(**values)
