"""Recipes: the configuration of a training run as one TOML file."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xformer.config import Config, check_keys, field_names
from xformer.errors import ConfigError, check_choice, describe_type
from xformer.families.checkpoint import check_exists, is_public
from xformer.families.gguf_file import find_gguf
from xformer.families.run_directory import RunDirectory, sha256
from xformer.io import StrPath
from xformer.models import EncoderConfig, LanguageModelConfig, TransformerConfig
from xformer.runs import config as run_config

DEFAULT_MINUTES = 30.0
# Default peaks of runs that start from a model: as in transformers, and ten times as much for adapters of it.
FINE_TUNING_RATE, ADAPTER_RATE, FINE_TUNING_WARMUP = 5e-5, 5e-4, 20
# Of runs that start from a model, unless they have a number of steps: steps of an epoch are those before accumulation.
MOST_EPOCHS, PATIENCE, LEAST_STEPS = 10, 2, 16
CLASS_STEPS = 60  # of classifiers without a number of epochs, at least, since few texts are one batch
# Of new models, unless they have a number of steps or minutes: epochs between validations, and at least steps.
EPOCHS_BETWEEN, STEPS_BETWEEN, NEW_PATIENCE = 10, 100, 5
PASS_TOKENS = 192  # of a batch with adapters, whose activations a laptop holds; longer rows are rematerialized

_SPECIAL_TOKENS = frozenset({"pad_id", "bos_id", "eos_id"})


@dataclass(frozen=True)
class TaskSpec:
    """A task that a recipe can name.

    Attributes:
        model: Configuration of the model, whose fields [model] sets.
        model_defaults: Defaults of [model]: a model that a CPU trains in half an hour. (The defaults of the
            configuration itself are those of the paper's base model.)
        from_tokenizer: Fields of the model's configuration that tokenizers or labels determine, not [model].
        tokenizer: Configuration of [tokenizer].
        training: Configuration of [training].
        defaults: Defaults of other tables where they differ from those of the configurations.
        metric: Name of the validation score, or None.
        unit: Name of a training example.
        train_command: Command that trains the model.
    """

    model: type[Any]
    model_defaults: Mapping[str, Any]
    from_tokenizer: frozenset[str]
    tokenizer: type[Config]
    training: type[run_config.BaseTrainingConfig]
    metric: str | None
    unit: str
    train_command: str
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def tables(self) -> dict[str, type[Any]]:
        """The configurations of the tables of a recipe."""
        return {"model": self.model, "tokenizer": self.tokenizer, "training": self.training}


_SIZES = {"d_model": 256, "num_heads": 4, "d_ff": 1024}
_PAIRS: dict[str, Any] = {
    "model": TransformerConfig,
    "model_defaults": {**_SIZES, "num_encoder_layers": 3, "num_decoder_layers": 3},
    "from_tokenizer": _SPECIAL_TOKENS | {"source_vocab_size", "target_vocab_size", "share_embeddings"},
    "tokenizer": run_config.TokenizerConfig,
    "training": run_config.TrainingConfig,
    "train_command": "train",
}
_LANGUAGE_MODEL: dict[str, Any] = {
    "model": LanguageModelConfig,
    # Rotary positions need no limit of the length, and several public families have them with all other defaults.
    "model_defaults": {**_SIZES, "num_layers": 4, "positions": "rotary", "scale_embeddings": False},
    "from_tokenizer": _SPECIAL_TOKENS | {"vocab_size"},
    "tokenizer": run_config.TextTokenizerConfig,
    "metric": None,
    "train_command": "train-lm",
}
TASKS = {
    "translation": TaskSpec(**_PAIRS, metric="BLEU", unit="sentence pair"),
    "summarization": TaskSpec(
        **_PAIRS,
        metric="ROUGE",
        unit="document",
        defaults={"tokenizer": {"documents": True}, "training": {"truncation": "cut"}},
    ),
    "language_modeling": TaskSpec(**_LANGUAGE_MODEL, training=run_config.LanguageModelTrainingConfig, unit="character"),
    "chat": TaskSpec(**_LANGUAGE_MODEL, training=run_config.ChatTrainingConfig, unit="conversation"),
    "classification": TaskSpec(
        **{**_LANGUAGE_MODEL, "model": EncoderConfig, "metric": "accuracy", "train_command": "classify"}
        | {"from_tokenizer": _SPECIAL_TOKENS | {"vocab_size", "num_labels", "labels", "problem_type"}},
        training=run_config.ClassTrainingConfig,
        unit="text",
        defaults={"model": {"dropout": 0.1}, "training": {"schedule": "linear", "label_smoothing": 0.0}},
    ),
}


@dataclass(frozen=True)
class Recipe:
    """A task, and the tables [model], [tokenizer] and [training].

    Attributes:
        task: A key of `TASKS`: "translation", "summarization", "language_modeling", "chat" or "classification".
        model: Fields of the model's configuration. Those left out have the `model_defaults` of the task: a small
            model. Vocabulary sizes and special tokens come from the tokenizer.
        tokenizer: A `TokenizerConfig`, or a `TextTokenizerConfig` for language models.
        training: A `TrainingConfig`; a `LanguageModelTrainingConfig` or `ChatTrainingConfig` for language models, a
            `ClassTrainingConfig` for classifiers.
        init: The model to start from. With one, model has only the settings that change it, and tokenizer is None
            if the tokenizer is one of a public checkpoint.
        given: Fields of training that `for_data` keeps; default those that differ from their defaults.
    """

    task: str = "translation"
    model: dict[str, Any] = field(default_factory=lambda: dict(TASKS["translation"].model_defaults))
    tokenizer: Any = field(default_factory=run_config.TokenizerConfig)
    training: Any = field(default_factory=run_config.TrainingConfig)
    init: run_config.InitConfig = field(default_factory=run_config.InitConfig)
    given: frozenset[str] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.given is None:
            values, defaults = self.training.to_dict(), type(self.training)().to_dict()
            object.__setattr__(self, "given", frozenset(name for name in values if values[name] != defaults[name]))

    @classmethod
    def from_dict(cls, tables: dict[str, Any], name: str = "the recipe") -> Recipe:
        """Check all tables and make a recipe.

        Args:
            tables: The tables by name, and "task".
            name: Name of the recipe in errors, e.g. "recipe.toml".

        Raises:
            ConfigError: For an unknown key, suggesting the nearest known one, or a value out of range.
        """
        tables = dict(tables)
        task = tables.pop("task", "translation")
        check_choice(f"task in {name}", task, TASKS)
        spec = TASKS[task]
        for key, table in tables.items():
            _check_table(key, table, spec, name)
        init = run_config.InitConfig.from_dict(tables.pop("init", {}), f"[init] of {name}")
        given = frozenset(key for key, value in tables.get("training", {}).items() if value is not None)
        is_new, own_tokenizer = init.path is None, tables.get("tokenizer")
        for key, value in init.to_dict().items():
            if is_new and value is not None:
                received = f"{key} of [init] in {name} is {value!r}, which needs the path of a model"
                raise ConfigError(f"{received}; set path, or omit {key}")
        for key, defaults in spec.defaults.items():
            tables[key] = {**defaults, **tables.get(key, {})}
        model = {**(spec.model_defaults if is_new else {}), **tables.get("model", {})}
        check_keys(model, set(field_names(spec.model)) - spec.from_tokenizer, f"[model] of {name}")
        tokenizer: Any = None
        if is_new or own_tokenizer:
            tokenizer = spec.tokenizer.from_dict(tables.get("tokenizer", {}), f"[tokenizer] of {name}")
        values = dict(tables.get("training", {}))
        if not is_new and not {"learning_rate", "learning_rate_factor"} & values.keys():
            values["learning_rate"] = FINE_TUNING_RATE if init.lora is None else ADAPTER_RATE
        training = spec.training.from_dict(values, f"[training] of {name}")
        rows = getattr(training, "batch_size", 0)
        if rows and init.lora is not None and not {"batch_size", "grad_accumulation"} & values.keys():
            # As many rows in a step, computed one after the other.
            size = max(1, PASS_TOKENS // (getattr(training, "context_length", None) or PASS_TOKENS))
            sizes: dict[str, Any] = {"batch_size": size, "grad_accumulation": max(1, rows // size)}
            training = dataclasses.replace(training, **sizes)
        if is_new:  # else the configuration of the model is not known here
            config = _model_config(spec, model, tokenizer, f"[model] of {name}")
            with error_context(f"[training] of {name}"):
                check_training(config, training)
        return cls(task, model, tokenizer, training, init, given)

    @classmethod
    def from_toml(cls, path: StrPath) -> Recipe:
        """Read a recipe file.

        Raises:
            ConfigError: If it is missing, not TOML, or not a recipe.
        """
        return cls.from_dict(read_tables(path), str(path))

    def to_dict(self) -> dict[str, Any]:
        """Return the tables as JSON-serializable dictionaries."""
        return {
            "task": self.task,
            **({} if self.init.path is None else {"init": self.init.to_dict()}),
            "model": self.model,
            "tokenizer": {} if self.tokenizer is None else self.tokenizer.to_dict(),
            "training": self.training.to_dict(),
        }

    def for_data(self, num_batches: int) -> Recipe:
        """Return the recipe with the settings that it leaves to the data, for a number of batches in an epoch.

        Without a number of steps, or of minutes for a new model, a run ends after half an hour or when its validations
        have become no better. One that starts from a model also ends after some epochs, with a validation after each;
        fewer batches in a step leave small data enough steps. Classifiers have a number of epochs instead.
        """
        now, epochs = self.training, getattr(self.training, "epochs", None)
        is_new, given, chosen = self.init.path is None, self.given or (), dict[str, Any]()
        if epochs or (now.max_steps is None and not (is_new and now.max_minutes)):
            if not epochs:
                chosen = {"max_minutes": DEFAULT_MINUTES, "patience": NEW_PATIENCE if is_new else PATIENCE}
            accumulation = now.grad_accumulation
            if not is_new and "grad_accumulation" not in given:
                accumulation = max(1, min(accumulation, num_batches // (1 if epochs else LEAST_STEPS)))
            epoch = math.ceil(num_batches / accumulation)
            least = CLASS_STEPS if epochs and "epochs" not in given else 0
            between = max(STEPS_BETWEEN, EPOCHS_BETWEEN * epoch) if is_new else max(epoch, least // 10)
            chosen |= {"grad_accumulation": accumulation}
            chosen["validate_every"] = min(run_config.BaseTrainingConfig.validate_every, between)
            chosen["max_steps"] = None if is_new else max(least, math.ceil((epochs or MOST_EPOCHS) * epoch))
        if not is_new:  # that of a new model would last longer than many of these runs
            max_steps = now.max_steps or chosen["max_steps"]
            chosen["warmup_steps"] = max(1, min(FINE_TUNING_WARMUP, max_steps // 10))
        return self.with_training(**{name: value for name, value in chosen.items() if name not in given})

    def with_training(self, **changes: Any) -> Recipe:
        """Return the recipe with other training options; None leaves an option as it is."""
        changes = {name: value for name, value in changes.items() if value is not None}
        return dataclasses.replace(self, training=dataclasses.replace(self.training, **changes))


# Settings of [model] that do not change the parameters.
MODEL_SETTINGS = frozenset({"dropout", "attention_dropout", "activation_dropout", "rematerialize"})


class InitialModel:
    """The model and tokenizer that a run starts from.

    Args:
        path: Directory of a public checkpoint in the Hugging Face format, a GGUF file, or the directory of a run.

    Attributes:
        path: The path.
        run: The run, or None for a public checkpoint.
        pretrained: Directory or GGUF file with the configuration and the tokenizer of a public checkpoint; None for a
            run with a tokenizer that xformer trained.

    Raises:
        CheckpointError: If the path is none of these.
    """

    def __init__(self, path: Path) -> None:
        check_exists(path)
        self.path = path
        self.run = None if is_public(path) else RunDirectory(path)
        self.pretrained = path if self.run is None else self.run.pretrained_files()

    def tables(self) -> dict[str, Any]:
        """Return the tables [model] and [tokenizer] of a run; {} for a public or fine-tuned checkpoint."""
        if self.run is None or self.pretrained is not None:
            return {}
        recipe = self.run.read_config()["recipe"]
        return {name: recipe[name] for name in ("model", "tokenizer")}

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each file with weights."""
        gguf = None if self.run else find_gguf(self.path)
        files = [self.run.model] if self.run else sorted(self.path.glob("*.safetensors")) if gguf is None else [gguf]
        return {path.name: sha256(path) for path in files}


def check_init_settings(tables: dict[str, Any], name: str) -> None:
    """Raise ConfigError for settings that conflict with those of an initial model."""
    for table, allowed in (("model", MODEL_SETTINGS), ("tokenizer", frozenset[str]())):
        values = tables.get(table, {})
        for key in values if isinstance(values, dict) else ():
            if key not in allowed:
                problem = f"{key} of [{table}] in {name} cannot be changed with --init, which determines it"
                raise ConfigError(f"{problem}; omit {key}")


RecipeSource = Recipe | StrPath | Mapping[str, Any] | None  # a recipe, its TOML file, or its tables


def make_recipe(source: RecipeSource, settings: Mapping[str, Any], tasks: Sequence[str]) -> Recipe:
    """Return the recipe of a run.

    Args:
        source: The recipe, its file or its tables.
        settings: Values that override it: tables by name, and keys of tables. `init` may be a path.
        tasks: Tasks that are allowed, the default first.

    Raises:
        ConfigError: For unknown keys, invalid values, and settings that conflict.
    """
    if not isinstance(source, Recipe | str | os.PathLike | Mapping | None):
        raise ConfigError(f"recipe is {describe_type(source)}; expected a Recipe, a TOML file or a dictionary")
    if isinstance(source, str | os.PathLike):
        name, tables = str(source), read_tables(source)
    else:
        name = "the options" if source is None else "the recipe"
        tables = source.to_dict() if isinstance(source, Recipe) else dict(source or {})
    task = settings.get("task") or tables.get("task", tasks[0])
    if task not in tasks:
        other = f"; use: xformer {TASKS[task].train_command}" if task in list(TASKS) else ""
        raise ConfigError(f"task is {task!r} in {name}; expected {' or '.join(tasks)}{other}")
    overrides = _by_table(settings, TASKS[task])
    for table, values in overrides.items():
        if isinstance(tables.get(table, {}), dict):
            tables[table] = {**tables.get(table, {}), **values}
    init = tables["init"].get("path") if isinstance(tables.get("init"), dict) else None
    if init is not None:
        check_init_settings(overrides if isinstance(source, Recipe) else tables, name)
        initial = InitialModel(Path(os.path.abspath(init)))
        if initial.run is not None:
            initial.run.read_config_for(task)  # raises an error for a run of another task
        tables["init"] = {**tables["init"], "path": str(initial.path)}
        for table, values in initial.tables().items():
            tables[table] = {**values, **tables.get(table, {})}
    changed = " with the options given" if overrides and source is not None else ""
    recipe = Recipe.from_dict({**tables, "task": task}, f"{name}{changed}")
    if not isinstance(source, Recipe):
        return recipe
    # Its tables have every field.
    return dataclasses.replace(recipe, given=(source.given or frozenset()) | overrides.get("training", {}).keys())


def setting(command: str, option: str) -> str | None:
    """Return the setting of a recipe, e.g. "model.d_model", that a command sets by no option, such as "--d-model"."""
    key = option.lstrip("-").replace("-", "_")
    for spec in TASKS.values():
        for table, config in spec.tables.items() if spec.train_command == command else ():
            if key in field_names(config) and (table == "tokenizer" or key not in spec.from_tokenizer):
                return f"{table}.{key}"
    return None


def _by_table(settings: Mapping[str, Any], spec: TaskSpec) -> dict[str, dict[str, Any]]:
    """Return settings by table; raise ConfigError for a key that is in no table."""
    configs = {**spec.tables, "init": run_config.InitConfig}
    places = {key: table for table, config in configs.items() for key in field_names(config)}
    own = spec.from_tokenizer | {"path"}
    places = {key: table for key, table in places.items() if table == "training" or key not in own}
    places |= dict.fromkeys(set(field_names(spec.tokenizer)) & spec.from_tokenizer, "tokenizer")
    tables: dict[str, dict[str, Any]] = {}
    nested = {}
    for key, value in settings.items():
        if key == "init" and isinstance(value, str | os.PathLike):
            value = {"path": os.fspath(value)}
        if key in configs and isinstance(value, Mapping):
            nested[key] = value
        elif key != "task":
            is_table = isinstance(value, Mapping) and key not in places  # such as --set foo.x=1
            check_keys([key], set(configs) if is_table else {*places, *configs, "task"}, "the options")
            tables.setdefault(places.get(key, key), {})[key] = value
    for table, values in nested.items():
        tables[table] = {**tables.get(table, {}), **values}
    return tables


def read_tables(path: StrPath) -> dict[str, Any]:
    """Return the tables of a recipe file, unchecked; raise ConfigError if it is missing or not TOML."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror or error}; check the path") from error
    except ValueError as error:
        raise ConfigError(f"recipe {path} is not valid TOML: {error}") from error


@contextlib.contextmanager
def error_context(name: str) -> Iterator[None]:
    """Prefix the message of a ConfigError that is raised inside the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_table(key: str, table: Any, spec: TaskSpec, name: str) -> None:
    """Raise ConfigError for an unknown table, or for a top-level key that belongs in a table."""
    tables = [f"[{each}]" for each, config in spec.tables.items() if key in field_names(config)]
    if tables and key not in spec.tables and key not in spec.from_tokenizer:
        raise ConfigError(f"{key!r} in {name} is outside the tables; expected it under {' or '.join(tables)}")
    check_keys([key], {"task", "init", *spec.tables}, name)
    if not isinstance(table, dict):
        raise ConfigError(f"{key!r} in {name} is {table!r}; expected a table [{key}]")


def _model_config(spec: TaskSpec, model: dict[str, Any], tokenizer: Any, name: str) -> Any:
    """Return the configuration of the model, with vocabularies of an arbitrary size; raise ConfigError."""
    derived: dict[str, Any] = {key: 8 for key in spec.from_tokenizer if key.endswith("vocab_size")}
    if "share_embeddings" in spec.from_tokenizer:
        derived["share_embeddings"] = tokenizer.joint
    with error_context(name):
        if model.get("num_decoder_layers") == 0:
            raise ConfigError("num_decoder_layers is 0; expected at least 1 to generate text")
        if model.get("copy") and derived.get("share_embeddings") is False:
            raise ConfigError("copy is true, which requires one vocabulary; set joint = true in [tokenizer]")
        return spec.model(**derived, **model)


def check_training(config: Any, training: run_config.BaseTrainingConfig) -> None:
    """Check that the settings of training fit the configuration of a model; raise ConfigError.

    Learned positions must cover a chunk of text, or the longest text with its eos. R-Drop requires dropout.
    """
    training.make_schedule(config.d_model)
    r_drop = getattr(training, "r_drop", 0.0)
    if r_drop and not (config.dropout or config.attention_dropout or config.activation_dropout):
        raise ConfigError(f"r_drop is {r_drop} and all dropout rates are 0; set dropout, or leave r_drop out")
    name = "context_length" if hasattr(training, "context_length") else "max_length"
    length = getattr(training, name) or 1
    limit = config.max_positions - isinstance(training, run_config.TrainingConfig)  # for eos
    if config.positions == "learned" and length > limit:
        reason = f"since positions are learned up to max_positions {config.max_positions}"
        raise ConfigError(f"{name} is {length}; expected at most {limit}, {reason}; lower it, or raise max_positions")
