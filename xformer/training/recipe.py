"""Recipes: everything a training run is told, as one TOML file: the task, and three tables."""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer.errors import ConfigError
from xformer.models import TransformerConfig
from xformer.models.config import check_key
from xformer.training.optimizers import Optimizer, make_optimizer
from xformer.training.schedules import schedule

_KINDS: dict[str, Any] = {"int": int, "float": int | float, "str": str, "bool": bool}
# A model that a CPU trains in half an hour or so; the configuration's own defaults are those of the paper.
_SMALL_MODEL = {"d_model": 256, "num_heads": 4, "d_ff": 1024, "num_encoder_layers": 3, "num_decoder_layers": 3}
_TASK_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "translation": {},
    "summarization": {"tokenizer": {"documents": True}, "training": {"long_lines": "cut"}},
}
# What the tokenizers decide.
_NOT_IN_RECIPES = {"source_vocab_size", "target_vocab_size", "share_embeddings", "pad_id", "bos_id", "eos_id"}


@dataclass(frozen=True)
class TokenizerSettings:
    """How text becomes tokens.

    vocab_size: tokens of the vocabulary (of each, when separate); model: "bpe", "words" or "characters";
    joint: one vocabulary for both sides, with one embedding table; lowercase: what the model writes is, too
    unicode_form: "NFC" or "NFKC"; documents: sources are documents, split into sentences with a token between them
    """

    vocab_size: int = 8000
    model: str = "bpe"
    joint: bool = True
    lowercase: bool = False
    unicode_form: str = "NFC"
    documents: bool = False


# Which values of the training settings are usable: names, a test (which None passes), and the test in words.
_RANGES: list[tuple[tuple[str, ...], Callable[[Any], bool], str]] = [
    (
        ("batch_tokens", "warmup_steps", "validate_every", "max_length", "max_updates", "accumulate", "patience",
         "checkpoint_every"),
        lambda value: value >= 1,
        "at least 1",
    ),
    (("seed", "shards", "keep_checkpoints"), lambda value: value >= 0, "at least 0"),
    (
        ("max_minutes", "learning_rate_factor", "learning_rate", "max_norm", "epsilon"),
        lambda value: 0 < value < math.inf,
        "more than 0",
    ),
    (("z_loss", "weight_decay", "min_learning_rate"), lambda value: 0.0 <= value < math.inf, "at least 0"),
    (("label_smoothing", "beta1", "beta2", "momentum"), lambda value: 0.0 <= value < 1.0, "a number in [0, 1)"),
    (("select_by",), lambda value: value in ("score", "loss"), "'score' or 'loss'"),
    (("average",), lambda value: value in ("none", "last", "best"), "'none', 'last' or 'best'"),
    (("long_lines",), lambda value: value in ("error", "drop", "cut"), "'error', 'drop' or 'cut'"),
    (("dtype",), lambda value: value in ("float32", "float64"), "'float32' or 'float64'"),
]  # fmt: skip


@dataclass(frozen=True)
class TrainingSettings:
    """How the model is trained.

    batch_tokens: most tokens in a batch, padding included, counted on the longer side
    max_updates, max_minutes: where training ends (whichever comes first; minutes include validation)
    schedule: "inverse_square_root", "cosine" or "linear" (which fall until max_updates), or "constant"
    learning_rate_factor, warmup_steps: the peak is factor * d_model^-0.5 * warmup_steps^-0.5
    learning_rate: the peak itself, in place of learning_rate_factor; min_learning_rate: where cosine and linear end
    optimizer: "adam", "adamw", "adafactor" (whose learning rate is relative; 0.01 is usual) or "sgd"
    beta1, beta2, epsilon: of adam and adamw; momentum: of sgd
    weight_decay: of the weights and embeddings, by adamw (default 0.01) or adafactor (default 0)
    accumulate: batches per update, worked on one after the other
    label_smoothing, max_norm: of the loss; of the gradient (clipping by global norm)
    z_loss: how much the squared logarithm of the softmax's denominator counts in the loss (PaLM: 1e-4)
    validate_every: updates between validations; each one saves the state, and the model if it is the best so far
    patience: validations without a better model that end training (None: it goes on)
    select_by: "score" (BLEU for translation, ROUGE for summarization) or "loss": what makes a model the best
    keep_checkpoints: models to keep in checkpoints/; checkpoint_every: updates between them (None: validate_every)
    average: "last" or "best": at the end, the mean of the checkpoints kept (the most recent ones, or those with the
    best scores) is validated, and becomes the model if it is better; "none": the most recent ones are only kept
    max_length: most tokens of a text; long_lines: what to do with longer ones: "error", "drop" the pair, or "cut" the
    source to the limit
    shards: pieces of a batch that are worked on side by side (0: one for each core, on NumPy); results depend on
    it in the last bits, so a resumed run keeps it
    """

    batch_tokens: int = 4096
    max_updates: int | None = None
    max_minutes: float | None = None
    schedule: str = "inverse_square_root"
    learning_rate_factor: float = 1.0
    learning_rate: float | None = None
    min_learning_rate: float = 0.0
    warmup_steps: int = 1000
    optimizer: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-9
    momentum: float = 0.9
    weight_decay: float | None = None
    accumulate: int = 1
    label_smoothing: float = 0.1
    z_loss: float = 0.0
    max_norm: float = 1.0
    validate_every: int = 500
    patience: int | None = None
    select_by: str = "score"
    keep_checkpoints: int = 0
    checkpoint_every: int | None = None
    average: str = "none"
    max_length: int = 256
    long_lines: str = "error"
    seed: int = 0
    dtype: str = "float32"
    shards: int = 0

    def __post_init__(self) -> None:
        for names, is_fine, expected in _RANGES:
            for name in names:
                value = getattr(self, name)
                if value is not None and not is_fine(value):
                    raise ConfigError(f"{name} is {value!r}; expected {expected}")
        self._check_checkpoints()
        self.make_optimizer()
        # An unknown schedule, or one that lacks its end, is refused before any work starts; without a learning rate
        # the peak depends on the model.
        schedule(self.schedule, **{**self.schedule_settings(1), "learning_rate": self.learning_rate or math.inf})

    def _check_checkpoints(self) -> None:
        if self.average != "none" and not self.keep_checkpoints:
            raise ConfigError(f"average is {self.average!r}, but keep_checkpoints is 0; expected the number of models")
        if self.average == "best" and self.checkpoint_interval % self.validate_every:
            raise ConfigError(
                f"checkpoint_every is {self.checkpoint_every}; average 'best' needs the score of each, so expected a "
                f"multiple of validate_every {self.validate_every}"
            )

    @property
    def checkpoint_interval(self) -> int:
        """Updates between the models that are kept."""
        return self.checkpoint_every or self.validate_every

    def make_optimizer(self) -> Optimizer:
        """The optimizer that the settings describe."""
        names = ("beta1", "beta2", "epsilon", "momentum", "weight_decay")
        return make_optimizer(self.optimizer, **{name: getattr(self, name) for name in names})

    def schedule_settings(self, d_model: int) -> dict[str, Any]:
        """What `schedule` is told, beside its name."""
        return {
            "factor": self.learning_rate_factor,
            "d_model": d_model,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.max_updates,
            "learning_rate": self.learning_rate,
            "min_learning_rate": self.min_learning_rate,
        }


@dataclass(frozen=True)
class Recipe:
    """A task, and the tables [model], [tokenizer] and [training].

    task: "translation" or "summarization", whose sources are documents, cut to the limit, by default
    model: fields of TransformerConfig; by default 3+3 layers, d_model 256, 4 heads, d_ff 1024. Vocabulary sizes come
    from the tokenizer.
    """

    task: str = "translation"
    model: dict[str, Any] = field(default_factory=lambda: dict(_SMALL_MODEL))
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    @classmethod
    def from_dict(cls, tables: dict[str, Any], where: str = "the recipe") -> Recipe:
        """Check every key and make a recipe; raises ConfigError, suggesting the nearest key for an unknown one."""
        tables = dict(tables)
        task = tables.pop("task", "translation")
        if task not in _TASK_DEFAULTS:
            raise ConfigError(f"task in {where} is {task!r}; expected one of {', '.join(_TASK_DEFAULTS)}")
        for name, table in tables.items():
            check_key(name, {"task", "model", "tokenizer", "training"}, where)
            if not isinstance(table, dict):
                raise ConfigError(f"{name!r} in {where} is {table!r}; expected a table [{name}]")
        for name, defaults in _TASK_DEFAULTS[task].items():
            tables[name] = defaults | tables.get(name, {})
        model = _SMALL_MODEL | tables.get("model", {})
        known = {f.name for f in dataclasses.fields(TransformerConfig)} - _NOT_IN_RECIPES
        for key in model:
            check_key(key, known, f"[model] of {where}")
        try:
            joint = bool(tables.get("tokenizer", {}).get("joint", True))
            config = TransformerConfig(source_vocab_size=8, target_vocab_size=8, share_embeddings=joint, **model)
        except ConfigError as error:
            raise ConfigError(f"[model] of {where}: {error}") from error
        tokenizer = _settings(TokenizerSettings, tables.get("tokenizer", {}), f"[tokenizer] of {where}")
        training = _settings(TrainingSettings, tables.get("training", {}), f"[training] of {where}")
        try:
            schedule(training.schedule, **training.schedule_settings(config.d_model))
        except ConfigError as error:
            raise ConfigError(f"[training] of {where}: {error}") from error
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
