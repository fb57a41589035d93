"""Recipes: everything a training run is told, as one TOML file of three tables."""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer.errors import ConfigError
from xformer.models import TransformerConfig
from xformer.models.config import check_key
from xformer.training.schedules import schedule

_KINDS: dict[str, Any] = {"int": int, "float": int | float, "str": str, "bool": bool}
# A model that a CPU trains in half an hour or so; the configuration's own defaults are those of the paper.
_SMALL_MODEL = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_encoder_layers": 3, "num_decoder_layers": 3}
# What the tokenizers decide.
_NOT_IN_RECIPES = {"source_vocab_size", "target_vocab_size", "share_embeddings", "pad_id", "bos_id", "eos_id"}


@dataclass(frozen=True)
class TokenizerSettings:
    """How text becomes tokens.

    vocab_size: tokens of the vocabulary (of each, when separate); model: "bpe", "words" or "characters";
    joint: one vocabulary for both languages, with one embedding table; lowercase: the translations are, too.
    """

    vocab_size: int = 8000
    model: str = "bpe"
    joint: bool = True
    lowercase: bool = False


@dataclass(frozen=True)
class TrainingSettings:
    """How the model is trained.

    batch_tokens: most tokens in a batch, padding included, counted on the longer side
    max_updates, max_minutes: where training ends (whichever comes first; minutes include validation)
    schedule: "inverse_square_root" or "cosine" (which falls to zero at max_updates)
    learning_rate_factor, warmup_steps: the peak is factor * d_model^-0.5 * warmup_steps^-0.5
    label_smoothing, max_norm: of the loss; of the gradient (clipping by global norm)
    validate_every: updates between validations; each one saves the state, and the model if it is the best so far
    select_by: "bleu" or "loss": what makes a model the best
    max_length: most tokens of a sentence; long_lines: "error" or "drop" for training pairs that are longer
    shards: pieces of a batch that are worked on side by side (0: one for each core, on NumPy); results depend on
    it in the last bits, so a resumed run keeps it
    """

    batch_tokens: int = 4096
    max_updates: int | None = None
    max_minutes: float | None = None
    schedule: str = "inverse_square_root"
    learning_rate_factor: float = 1.0
    warmup_steps: int = 1000
    label_smoothing: float = 0.1
    max_norm: float = 1.0
    validate_every: int = 500
    select_by: str = "bleu"
    max_length: int = 256
    long_lines: str = "error"
    seed: int = 0
    dtype: str = "float32"
    shards: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_tokens", "warmup_steps", "validate_every", "max_length"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        _check(self.max_updates is None or self.max_updates >= 1, "max_updates", self.max_updates, "at least 1")
        _check(
            self.max_minutes is None or 0 < self.max_minutes < math.inf, "max_minutes", self.max_minutes, "more than 0"
        )
        _check(
            0 < self.learning_rate_factor < math.inf, "learning_rate_factor", self.learning_rate_factor, "more than 0"
        )
        _check(0.0 <= self.label_smoothing < 1.0, "label_smoothing", self.label_smoothing, "a number in [0, 1)")
        _check(0 < self.max_norm < math.inf, "max_norm", self.max_norm, "more than 0")
        _check(self.select_by in ("bleu", "loss"), "select_by", self.select_by, "'bleu' or 'loss'")
        _check(self.long_lines in ("error", "drop"), "long_lines", self.long_lines, "'error' or 'drop'")
        _check(self.dtype in ("float32", "float64"), "dtype", self.dtype, "'float32' or 'float64'")
        _check(self.seed >= 0, "seed", self.seed, "at least 0")
        _check(self.shards >= 0, "shards", self.shards, "at least 0")
        # An unknown schedule, or one that lacks its end, is refused before any work starts.
        schedule(self.schedule, factor=1.0, d_model=1, warmup_steps=1, total_steps=self.max_updates)


@dataclass(frozen=True)
class Recipe:
    """The tables [model], [tokenizer] and [training]; the model's vocabulary sizes come from the tokenizer.

    model: fields of TransformerConfig; by default 3+3 layers, d_model 256, 4 heads, d_ff 1024.
    """

    model: dict[str, Any] = field(default_factory=lambda: dict(_SMALL_MODEL))
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    @classmethod
    def from_dict(cls, tables: dict[str, Any], where: str = "the recipe") -> Recipe:
        """Check every key and make a recipe; raises ConfigError, suggesting the nearest key for an unknown one."""
        for name, table in tables.items():
            check_key(name, {"model", "tokenizer", "training"}, where)
            if not isinstance(table, dict):
                raise ConfigError(f"{name!r} in {where} is {table!r}; expected a table [{name}]")
        model = _SMALL_MODEL | tables.get("model", {})
        known = {f.name for f in dataclasses.fields(TransformerConfig)} - _NOT_IN_RECIPES
        for key in model:
            check_key(key, known, f"[model] of {where}")
        try:
            TransformerConfig(source_vocab_size=8, target_vocab_size=8, **model)
        except ConfigError as error:
            raise ConfigError(f"[model] of {where}: {error}") from error
        return cls(
            model,
            _settings(TokenizerSettings, tables.get("tokenizer", {}), f"[tokenizer] of {where}"),
            _settings(TrainingSettings, tables.get("training", {}), f"[training] of {where}"),
        )

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Recipe:
        """Read a recipe file; raises ConfigError when it is missing, not TOML, or holds an unknown key."""
        return cls.from_dict(read_tables(path), str(path))

    def to_dict(self) -> dict[str, Any]:
        """The tables as JSON-ready dictionaries."""
        return {
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


def _settings(kind: type[Any], values: dict[str, Any], where: str) -> Any:
    """Make settings of a dataclass from a table, checking keys and kinds of values."""
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key, value in values.items():
        check_key(key, set(fields), where)
        wanted = str(fields[key].type)
        if value is None and wanted.endswith("| None"):
            continue  # a recipe that was saved as JSON
        wanted = wanted.removesuffix(" | None")
        if not isinstance(value, _KINDS[wanted]) or (isinstance(value, bool) and wanted != "bool"):
            raise ConfigError(f"{key} in {where} is {value!r}; expected a value of type {wanted}")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check(fine: bool, name: str, value: Any, expected: str) -> None:
    if not fine:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")
