"""Training from text to a model in a run directory: `train`, `train_lm` and `resume`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from xformer.backends import resolve_known
from xformer.config import dotted
from xformer.distributed import Communicator, abort_on_error, connect
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.families.run_directory import RunDirectory
from xformer.io import StrPath, read_log, write_json
from xformer.native import is_reproducible, use_reproducible_algorithms
from xformer.pipelines import Classifier, Pipeline, Summarizer, TextGenerator, Translator, pipeline_class
from xformer.runs.backend import open_backend
from xformer.runs.chats import ChatTask, as_json_lines
from xformer.runs.classes import ClassTask, as_lines
from xformer.runs.console import make_console, plural
from xformer.runs.inputs import Text, file_digest, open_texts
from xformer.runs.pairs import PairsTask
from xformer.runs.progress import TrainingProgress, summarize
from xformer.runs.recipe import InitialModel, Recipe, RecipeSource, make_recipe
from xformer.runs.tasks import Task, TextTask
from xformer.runs.trainer import Trainer
from xformer.text.extras import require
from xformer.training import Callback, Logger, MLflow, TensorBoard, WeightsAndBiases
from xformer.training.data_parallel import check_shards, default_num_workers
from xformer.training.precision import check_precision

LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
_Pipeline = TypeVar("_Pipeline", bound=Pipeline)
_TASKS: Sequence[type[Task]] = (PairsTask, TextTask, ChatTask, ClassTask)


@dataclass(frozen=True)
class TrainedRun(Generic[_Pipeline]):
    """A training run that has ended.

    Attributes:
        directory: The run directory. `xformer.resume` continues it.
        reason: Why training ended.
        xp: Array library of the pipeline.
        rank: Number of this process, if several trained together.
    """

    directory: Path
    reason: str
    xp: Any
    rank: int = 0

    @functools.cached_property
    def pipeline(self) -> _Pipeline:
        """The best model as a `Translator`, `Summarizer`, `TextGenerator` or `Classifier`, loaded at its first use."""
        return pipeline_class(self.directory).from_pretrained(self.directory, xp=self.xp)  # type: ignore[return-value]

    @property
    def history(self) -> list[dict[str, Any]]:
        """The events of log.jsonl: each 10th step, validations, checkpoints and the end."""
        return read_log(RunDirectory(self.directory).log)


def train(
    recipe: RecipeSource = None,
    *,
    source: Text,
    target: Text,
    valid_source: Text | None = None,
    valid_target: Text | None = None,
    out: StrPath,
    xp: Any = "numpy",
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str] = (),
    distributed: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> TrainedRun[Translator | Summarizer]:
    """Train a translator, or a summarizer, on pairs of texts, as `xformer train` does.

    A text is the path of a file with one text per line, a list of `pathlib.Path`, or an iterable of strings. Line n of
    the target belongs to line n of the source. The vocabulary is learned from the training text. Token ids are kept in
    temporary files near `out` that are mapped into memory, so the text may be larger than the memory.

    Args:
        recipe: TOML file, dictionary of its tables, or `Recipe`. Default: a small model for half an hour.
        source: Training text, source side.
        target: Training text, target side.
        valid_source: Validation text, source side. Default: random pairs of the training text (`valid_share`).
        valid_target: Validation text, target side.
        out: Directory of the run: new or empty.
        xp: Array library, as a module or by name.
        callbacks: Functions (event, loop) as for `fit`.
        loggers: Names of tools to log to: "tensorboard", "mlflow", "wandb".
        distributed: "mpi" or "nccl" to train with all processes that mpiexec has started.
        progress: Print data, model, validations and progress.
        **settings: Keys of a recipe, which override those of `recipe`: `task="summarization"`, `d_model=512`,
            `max_minutes=10`, `init="opus-mt-de-en"`, or whole tables: `model={"dropout": 0.1}`.

    Returns:
        The run, whose `pipeline` is ready to use.

    Raises:
        ConfigError: For an unknown key, suggesting the nearest known one, or an invalid value.
        DataError: For text that is missing, empty or invalid, or does not fit the recipe.
        CheckpointError: If the directory cannot be written.

    The input is checked before anything is written to `out`.
    """
    valid = {"valid_source": valid_source, "valid_target": valid_target}
    texts = {"source": source, "target": target}
    texts |= _given(valid, settings, valid_source="valid_target", valid_target="valid_source")
    launch = _Launch(xp, distributed, callbacks, loggers, progress)
    return launch.start(PairsTask, recipe, settings, texts, RunDirectory(out))


def train_lm(
    recipe: RecipeSource = None,
    *,
    text: Text | None = None,
    valid_text: Text | None = None,
    chats: Any = None,
    valid_chats: Any = None,
    out: StrPath,
    xp: Any = "numpy",
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str] = (),
    distributed: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> TrainedRun[TextGenerator]:
    """Train a language model on one text, or on the answers of chats, as `xformer train-lm` does.

    Args:
        recipe: TOML file, dictionary of its tables, or `Recipe`.
        text: Training text: the path of a file, a list of `pathlib.Path`, or an iterable of strings, each of which
            ends a line.
        valid_text: Validation text. Default: the end of the text (`valid_share`).
        chats: Conversations in place of a text: the path of a file with one JSON object per line,
            `{"messages": [{"role": "user", "content": "..."}, ...]}` and optionally "tools", a list of `pathlib.Path`,
            or an iterable of such dictionaries or of lists of messages. The loss is that of the tokens of the
            assistant's answers (see `pipelines.encode_conversation`). `init` must name a model with a chat template.
        valid_chats: Conversations for validation. Default: random ones of `chats` (`valid_share`).
        out: As for `train`.
        xp: As for `train`.
        callbacks: As for `train`.
        loggers: As for `train`.
        distributed: As for `train`.
        progress: As for `train`.
        **settings: As for `train`.

    Returns:
        The run, whose `pipeline` is a `TextGenerator`.

    Raises:
        XformerError: As `train`.
    """
    values = {"text": text, "valid_text": valid_text}
    values |= {"chats": as_json_lines(chats), "valid_chats": as_json_lines(valid_chats)}
    if len(inputs := [name for name in ("text", "chats") if values[name] is not None]) != 1:
        raise ConfigError(f"{'text and chats are both' if inputs else 'neither text nor chats is'} given; expected one")
    texts = _given(values, settings, valid_text="text", valid_chats="chats")
    launch = _Launch(xp, distributed, callbacks, loggers, progress)
    return launch.start(TextTask if "text" in texts else ChatTask, recipe, settings, texts, RunDirectory(out))


def train_classifier(
    recipe: RecipeSource = None,
    *,
    train: Any,
    train_labels: Any = None,
    valid: Any = None,
    valid_labels: Any = None,
    out: StrPath,
    xp: Any = "numpy",
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str] = (),
    distributed: str | None = None,
    progress: bool = True,
    **settings: Any,
) -> TrainedRun[Classifier]:
    """Fine-tune an encoder as a classifier of texts, as `xformer classify` does.

    Args:
        recipe: TOML file, dictionary of its tables, or `Recipe`.
        train: The path of a file with a text, a tab and its label in each line (a first line may name the columns
            "text" and "label"), or an iterable of pairs (text, label). With `train_labels`, texts, as for `train`.
        train_labels: Labels of the texts: the path of a file with one per line, or an iterable.
        valid: Texts for validation. Default: a random part of the training set (`valid_share`).
        valid_labels: Their labels.
        out: As for `train`.
        xp: As for `train`.
        callbacks: As for `train`.
        loggers: As for `train`.
        distributed: As for `train`.
        progress: As for `train`.
        **settings: As for `train`, e.g. `init="bert-base-uncased"`, `epochs=3`, `patience=2`.

    Returns:
        The run, whose `pipeline` is a `Classifier`.

    Raises:
        XformerError: As `train`.
    """
    values = {"train": train, "train_labels": train_labels, "valid": valid, "valid_labels": valid_labels}
    texts = _given({name: as_lines(value) for name, value in values.items()}, settings, valid_labels="valid")
    launch = _Launch(xp, distributed, callbacks, loggers, progress)
    return launch.start(ClassTask, recipe, settings, texts, RunDirectory(out))


def resume(
    run: StrPath,
    *,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    data: StrPath | None = None,
    xp: Any = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str] | None = None,
    distributed: str | None = None,
    progress: bool = True,
) -> TrainedRun[Translator | Summarizer | TextGenerator | Classifier]:
    """Continue a run that was stopped, or train a finished one longer, as `xformer resume` does.

    Args:
        run: Directory of the run.
        max_steps: Replaces the number of steps of the recipe.
        max_minutes: Replaces the minutes of the recipe.
        data: Directory of the data files, if they were moved.
        xp: Array library; default that of the run.
        callbacks: As for `train`.
        loggers: As for `train`; default those of the run.
        distributed: As for `train`.
        progress: As for `train`.

    Raises:
        CheckpointError: If there is no run, or it is damaged.
        DataError: If the data has changed.
        ConfigError: For invalid values.
    """
    directory = RunDirectory(run)
    directory.read_config()
    with _open_communicator(distributed) as ranks, _lock(directory, ranks):
        config = directory.read_config()
        directory.check_resumable()
        task_type, recipe, files = _read_run(directory, config)
        loggers = config.get("loggers", []) if loggers is None else loggers
        _check_loggers(loggers)
        changes = {"max_steps": max_steps, "max_minutes": max_minutes}
        recipe = Recipe.from_dict(recipe.with_training(**changes).to_dict(), str(directory.config))
        paths = _find_files(files, directory, data)
        init = recipe.init.path
        if init is not None and InitialModel(Path(init)).digests() != config.get("init"):
            raise CheckpointError(f"{init} has changed since the run started (a SHA-256 differs); restore it")
        xp = _open_backend(xp or resolve_known(config["backend"]), recipe)
        task = task_type.prepare(recipe, xp, paths, directory.path, directory)
        resumed = {**config, "recipe": recipe.to_dict(), "loggers": list(loggers)}
        resumed["backend"] = task.xp.name
        resumed["data"] = {name: {"path": path.as_posix(), "sha256": files[name][1]} for name, path in paths.items()}
        check_shards(recipe.training.data_parallel or 1, ranks)
        _check_agreement(ranks, resumed)
        if ranks.rank == 0 and resumed != config:
            write_json(directory.config, resumed)
        launch = _Launch(xp, distributed, callbacks, loggers, progress)
        return launch.train(task, directory, ranks, is_resumed=True)


def _given(values: Mapping[str, Any], settings: Mapping[str, Any], **needed: str) -> dict[str, Any]:
    """Return the texts that are given; raise ConfigError for one without that which it needs, or with `valid_share`."""
    texts = {name: value for name, value in values.items() if value is not None}
    for name in texts:
        if needed.get(name, name) not in texts:
            raise ConfigError(f"{name} is given without {needed[name]}; expected both, or neither")
        if name.startswith("valid") and "valid_share" in settings:
            raise ConfigError(f"{name} and valid_share are both given; expected only one of them")
    return texts


@dataclass(frozen=True)
class _Launch:
    """The arguments that all training functions have; see `train`."""

    xp: Any
    distributed: str | None
    callbacks: Sequence[Callback]
    loggers: Sequence[str]
    progress: bool

    def start(
        self, task_type: type[Task], recipe: RecipeSource, settings: dict[str, Any], texts: Any, run: RunDirectory
    ) -> TrainedRun[Any]:
        """Train in a new run directory, after checking everything."""
        with _open_communicator(self.distributed) as ranks:
            if ranks.rank == 0:
                run.check_is_free()
            _check_loggers(self.loggers)
            made = make_recipe(recipe, settings, task_type.names).with_training(reproducible=is_reproducible() or None)
            xp = _open_backend(self.xp, made)
            with open_texts(texts, run) as files:
                data = files.describe()
                directory = next(path for path in (run.path.absolute(), *run.path.absolute().parents) if path.is_dir())
                task = task_type.prepare(made, xp, files.paths, directory)
                default = default_num_workers(task.model, ranks if self.distributed else None)
                shards = made.training.data_parallel or default
                task.recipe = task.recipe.with_training(data_parallel=shards)  # the last bits depend on it
                check_shards(shards, ranks)
                config = {**task.config(data), "loggers": list(self.loggers)}
                _check_agreement(ranks, config)
                if ranks.rank == 0:
                    run.start(config, task.tokenizers())
                    files.keep()
            with _lock(run, ranks):
                return self.train(task, run, ranks)

    def train(self, task: Task, run: RunDirectory, ranks: Communicator, *, is_resumed: bool = False) -> TrainedRun[Any]:
        """Train in a run directory that is locked, and print the progress and the result on rank 0."""
        console = make_console(quiet=ranks.rank > 0 or not self.progress)
        for line in task.describe():
            console.print(line)
        if ranks.size > 1:
            shards = plural(task.recipe.training.data_parallel // ranks.size, "shard")
            console.print(f"{ranks.size} ranks with {shards} each")
        shown = TrainingProgress(console, task.recipe.training, unit=task.unit)
        loggers = [_make_logger(name, task, run) for name in dict.fromkeys(self.loggers) if ranks.rank == 0]
        trainer = Trainer(task, run, callbacks=[shown, *self.callbacks, *loggers], communicator=ranks)
        if is_resumed and not run.last.exists():
            console.print("nothing was saved yet; starting from the first step")
        with shown:
            reason = trainer.run()
        if not shown.is_used and not reason.startswith("stopped by SIG"):
            reason = f"nothing left to do: {reason}"
        for line in summarize(trainer, reason):
            console.print(line)
        if ranks.rank == 0 and run.model.exists():
            for line in task.report(run.model):
                console.print(line)
        return TrainedRun(run.path, reason, task.xp, ranks.rank)


def _make_logger(name: str, task: Task, run: RunDirectory) -> Logger:
    options: dict[str, Any] = {"samples": task.samples, "figures": task.figures}
    if name == "tensorboard":
        return TensorBoard(run.path / name, **options)
    options["run_name"] = run.path.resolve().name
    return MLflow(**options) if name == "mlflow" else WeightsAndBiases(directory=run.path, **options)


def _check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown logger, BackendError if its package is missing."""
    for name in [names] if isinstance(names, str) else names:
        if name not in LOGGERS or isinstance(names, str):
            raise ConfigError(f"loggers is {names!r}; expected a list of {', '.join(map(repr, LOGGERS))}")
        require(LOGGERS[name].package)
        require("matplotlib")


def _open_backend(xp: Any, recipe: Recipe) -> Any:
    if recipe.training.reproducible:
        use_reproducible_algorithms()
    elif is_reproducible():
        raise ConfigError("the run has reproducible=false; omit --reproducible and unset XFORMER_REPRODUCIBLE")
    xp = open_backend(xp, recipe.training.dtype)
    check_precision(recipe.training.precision, xp.zeros(1, dtype=xp.float32))
    return xp


@contextlib.contextmanager
def _open_communicator(name: str | None) -> Iterator[Communicator]:
    """Connect the ranks; an error on one of them is reported and ends all. Rank 0 alone prints anything else."""
    communicator = connect(name)
    if communicator.rank > 0:
        logging.getLogger("xformer").setLevel(logging.ERROR)
    with abort_on_error(communicator):
        yield communicator


def _lock(run: RunDirectory, ranks: Communicator) -> contextlib.AbstractContextManager[None]:
    return run.lock() if ranks.rank == 0 else contextlib.nullcontext()


def _check_agreement(communicator: Communicator, config: dict[str, Any]) -> None:
    """Raise ConfigError unless all ranks have the same configuration, which has the digests of their data."""
    first, *others = map(dotted, communicator.all_gather(config))
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                raise ConfigError(f"{name} is {other.get(name)!r} on rank {rank}; expected {value!r}, as on rank 0")


def _read_run(run: RunDirectory, config: dict[str, Any]) -> tuple[type[Task], Recipe, dict[str, tuple[Path, str]]]:
    """Return the task of a run, its recipe, and path and SHA-256 of its data files."""
    try:
        task_type = {name: task for task in _TASKS for name in task.names}[config["task"]]
        files = {name: (Path(entry["path"]), str(entry["sha256"])) for name, entry in config["data"].items()}
        return task_type, Recipe.from_dict(config["recipe"], str(run.config)), files
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{run.config} is incomplete ({error!r}); restore it") from error


def _find_files(files: Mapping[str, tuple[Path, str]], run: RunDirectory, moved_to: Any) -> dict[str, Path]:
    """Return the data files of a run, which may have moved, after checking that they have not changed."""
    names = [path.name for path, _ in files.values()]
    if moved_to is not None and len({*names}) < len(names):
        raise ConfigError(f"data: two files are called {max(names, key=names.count)}; expected other names")
    found = {}
    for name, (path, digest) in files.items():
        if path.parent.name == "data" and not path.exists():
            path = run.path.absolute() / "data" / path.name
        if moved_to is not None:
            path = Path(moved_to).absolute() / path.name
        if not path.exists():
            raise DataError(f"{path} does not exist; restore it, or name the directory with the data (data, --data)")
        if file_digest(path) != digest:
            raise DataError(f"{path} has changed since the run started (its SHA-256 differs); restore it")
        found[name] = path
    return found
