"""Training runs, from options to a model in a run directory; shared by train, train-lm, resume and demo."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from rich.console import Console

import xformer
from xformer.cli._console import TrainingProgress, format_number, make_console, plural, program
from xformer.cli._options import option_name, parse_recipe_overrides
from xformer.config import field_names
from xformer.distributed import Communicator, SingleProcess, abort_on_error, connect
from xformer.errors import CheckpointError, ConfigError, DataError
from xformer.families.run_directory import COMMANDS, RunDirectory, sha256
from xformer.models import BaseModel
from xformer.pipelines import Attention
from xformer.runs.initial_model import InitialModel, check_init_settings
from xformer.runs.recipe import Recipe, check_training, error_context, read_tables
from xformer.runs.tasks import TASKS, Task
from xformer.runs.trainer import Trainer
from xformer.text.extras import require
from xformer.training import Callback, Logger, MLflow, TensorBoard, WeightsAndBiases
from xformer.training.data_parallel import check_shards, default_num_workers
from xformer.training.loggers import Rows

INIT_HELP = """With --init, training starts from a public checkpoint or a run, with its tokenizer. The learning rate \
is then 5e-5 unless set, and \\[model] has only dropout, attention_dropout, activation_dropout and rematerialize. \
`xformer export DIR OUT` writes a tuned checkpoint back in its own format.

Uses all cores; XFORMER_NUM_THREADS=N limits the number of threads.
"""
DEFAULT_MINUTES = 30.0
LOGGERS: dict[str, type[Logger]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
# Exit codes as a shell reports them for a process that a signal ended.
_EXIT_CODES = {"stopped by SIGHUP": 129, "stopped by SIGINT": 130, "stopped by SIGTERM": 143}


@dataclass(frozen=True)
class TrainingJob(ABC):
    """Model and data of a training run, checked before anything is written. The recipe includes the shard count.

    Attributes:
        tasks: Tasks that the command trains, the default first.
        required: Names of required data files.
        optional: Names of optional data files.
        unit: Unit of the training speed.
    """

    tasks: ClassVar[tuple[str, ...]]
    required: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    unit: ClassVar[str]

    recipe: Recipe
    model: Any
    backend: str

    @classmethod
    @abstractmethod
    def prepare(cls, recipe: Recipe, backend: str, files: Mapping[str, Path], run: RunDirectory | None) -> TrainingJob:
        """Read the files and make the job; `run` is the run to be resumed, if any."""

    @abstractmethod
    def task(self, *, communicator: Communicator | None = None) -> Task:
        """Return the task for a Trainer."""

    @abstractmethod
    def tokenizers(self) -> Mapping[str, Any]:
        """Return the tokenizers by their names in a run directory."""

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Return the sizes of the data."""

    @abstractmethod
    def samples(self, model: Any, task: Task) -> Rows:
        """Return outputs of the model for validation text, for loggers."""

    @abstractmethod
    def attention(self, model: Any) -> Attention:
        """Return the attention of the model for one validation text, for loggers."""

    def figures(self, model: Any) -> dict[str, Any]:
        """Return a plot of the attention of each layer, for loggers."""
        attention = self.attention(model)
        kind, first = next(iter(attention.maps.items()))
        return {f"attention/layer {n}": attention.plot(kind, layer=n) for n in range(len(first.weights))}

    @abstractmethod
    def describe_data(self) -> Iterator[str]:
        """Yield lines that describe the data."""

    def config(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration to be stored in the run directory; `data` describes the origin of the data."""
        return {
            "task": self.recipe.task,
            "xformer": xformer.__version__,
            "backend": self.backend,
            "seed": self.recipe.training.seed,
            "recipe": self.recipe.to_dict(),
            "init": {} if self.recipe.init.path is None else InitialModel(Path(self.recipe.init.path)).digests(),
            "model": self.model.config.to_dict(),
            "num_parameters": self.model.parameter_count(),
            "data": data,
            "counts": self.counts(),
        }

    def describe(self, console: Console) -> None:
        """Print three lines about data and model."""
        for line in self.describe_data():
            console.print(line)
        settings = self.recipe.training
        if self.recipe.init.path is not None:
            console.print(f"start: the parameters and the tokenizer of {self.recipe.init.path}")
        sizes = [f"{tokenizer.vocab_size:,}" for tokenizer in self.tokenizers().values()]
        vocabulary = f"{'vocabulary' if len(sizes) == 1 else 'vocabularies'} of {' and '.join(sizes)} tokens"
        mixed = settings.precision != "float32"
        precision = f"{settings.precision} mixed precision" if mixed else settings.dtype
        console.print(
            f"model: {plural(self.model.parameter_count(), 'parameter')}, {vocabulary}; "
            f"{self.backend}, {precision}, {plural(settings.data_parallel, 'shard')}, seed {settings.seed}"
        )


def start_run(
    job_type: type[TrainingJob],
    out: Path,
    files: dict[str, Path | None],
    *,
    recipe: Path | None,
    settings: dict[str, Any],
    overrides: Sequence[str] | None,
    backend: str,
    task: str | None = None,
    init: Mapping[str, Any] = MappingProxyType({}),
    loggers: Sequence[str] | None = None,
    distributed: str | None = None,
) -> int:
    """Train in a new run directory, after checking everything.

    Args:
        job_type: Model and data.
        out: Run directory.
        files: Data files by name.
        recipe: Recipe file.
        settings: Options for fields of the tokenizer and training configurations, which override the recipe.
        overrides: Values of --set, which override the recipe.
        backend: Name of the backend.
        task: Value of --task.
        init: Fields of `InitConfig` that were given.
        loggers: Values of --logger.
        distributed: Value of --distributed.

    Returns:
        The exit code.
    """
    run, paths = RunDirectory(out), {name: path for name, path in files.items() if path is not None}
    with open_communicator(distributed) as ranks:
        if ranks.rank == 0:
            run.check_is_free()
        check_loggers(loggers or ())
        missing = [option_name(name) for name in job_type.required if name not in paths]
        if missing:
            required = ", ".join(map(option_name, job_type.required))
            raise ConfigError(f"{', '.join(missing)} missing; expected {required}")
        overrides_by_table = parse_recipe_overrides(overrides)
        given = {name: str(value) for name, value in init.items() if value is not None}
        if given:
            overrides_by_table["init"] = {**overrides_by_table.get("init", {}), **given}
        values = _make_recipe(job_type.tasks, recipe, settings, overrides_by_table, task)
        job = job_type.prepare(values, backend, paths, None)
        if distributed is not None and not values.training.data_parallel:
            num_shards = default_num_workers(job.model, ranks)
            job = dataclasses.replace(job, recipe=job.recipe.with_training(data_parallel=num_shards))
        check_shards(job.recipe.training.data_parallel, ranks)
        data = {name: {"path": os.path.abspath(path), "sha256": file_digest(path)} for name, path in paths.items()}
        config = {**job.config(data), "loggers": list(loggers or ())}
        check_agreement(ranks, config)
        if ranks.rank > 0:
            return train_and_report(job, run, communicator=ranks)
        run.start(config, job.tokenizers())
        with run.lock():
            return train_and_report(job, run, loggers=loggers or (), communicator=ranks)


@contextlib.contextmanager
def open_communicator(name: str | None) -> Iterator[Communicator]:
    """Connect the ranks; an error on one of them is reported and ends all. Rank 0 alone prints anything else."""
    communicator = connect(name)
    if communicator.rank > 0:
        logging.getLogger("xformer").setLevel(logging.ERROR)
    with abort_on_error(communicator):
        yield communicator


def check_agreement(communicator: Communicator, config: dict[str, Any]) -> None:
    """Raise ConfigError unless all ranks have the same configuration, which has the digests of their data."""
    first, *others = (dict(_items(each)) for each in communicator.all_gather(config))
    for rank, other in enumerate(others, start=1):
        for name, value in first.items():
            if other.get(name) != value:
                raise ConfigError(f"{name} is {other.get(name)!r} on rank {rank}; expected {value!r}, as on rank 0")


def _items(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts with their names, e.g. ("recipe.training.seed", 1)."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _items(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _make_recipe(
    tasks: Sequence[str],
    path: Path | None,
    settings: dict[str, Any],
    overrides: dict[str, dict[str, Any]],
    requested: str | None,
) -> Recipe:
    """Return the recipe with the options applied; raise ConfigError for invalid values."""
    tables = read_tables(path) if path else {}
    task = requested or tables.get("task", tasks[0])
    if task not in tasks:
        origin = "--task" if requested else f"task in {path}"
        other = f"; use: xformer {TASKS[task].train_command}" if task in list(TASKS) else ""
        raise ConfigError(f"{origin} is {task!r}; expected {' or '.join(tasks)}{other}")
    training_fields = field_names(TASKS[task].training)
    options = [
        ("training" if name in training_fields else "tokenizer", {name: value}) for name, value in settings.items()
    ]
    for table, values in [*options, *overrides.items()]:
        if isinstance(tables.get(table, {}), dict):
            tables[table] = tables.get(table, {}) | values
    path_of_init = tables["init"].get("path") if isinstance(tables.get("init"), dict) else None
    if path_of_init is not None:
        check_init_settings(tables, str(path) if path else "the options")
        initial = InitialModel(Path(os.path.abspath(path_of_init)))
        initial.check_task(task)
        tables["init"] = {**tables["init"], "path": str(initial.path)}
        for table, values in initial.tables().items():
            tables[table] = {**values, **tables.get(table, {})}
    changed = " with the options given" if settings or overrides else ""
    recipe = Recipe.from_dict({**tables, "task": task}, f"{path}{changed}" if path else "the options")
    if recipe.training.max_minutes is None and recipe.training.max_steps is None:
        recipe = recipe.with_training(max_minutes=DEFAULT_MINUTES)
    return recipe


def check_loggers(names: Sequence[str]) -> None:
    """Raise BackendError if a package of a logger is missing."""
    for name in names:
        require(LOGGERS[name].package)
        require("matplotlib")


def train_and_report(
    job: TrainingJob,
    run: RunDirectory,
    *,
    resume: bool = False,
    loggers: Sequence[str] = (),
    communicator: Communicator | None = None,
) -> int:
    """Train in a run directory that is locked, and print the result on rank 0; returns the exit code."""
    ranks = communicator or SingleProcess()
    console = make_console(quiet=ranks.rank > 0)
    job.describe(console)
    if ranks.size > 1:
        console.print(
            f"{ranks.size} ranks with {plural(job.recipe.training.data_parallel // ranks.size, 'shard')} each"
        )
    outcome = train_job(job, run, console, resume=resume, loggers=loggers, communicator=ranks)
    print_summary(job.recipe.task, outcome, run, console)
    return outcome.exit_code


def load_initial_model(recipe: Recipe, model_class: type[BaseModel], xp: Any) -> Any:
    """Return the model that a run starts from; raise ConfigError if the recipe does not fit it."""
    initial = InitialModel(Path(str(recipe.init.path)))
    model = initial.load(model_class, recipe.model, xp=xp, dtype=recipe.training.dtype)
    with error_context("[training]"):
        check_training(model.config, recipe.training)
    return model


def initial_tokenizer_files(recipe: Recipe, run: RunDirectory | None) -> tuple[RunDirectory | None, Path | None]:
    """Return the run, and the directory of public files, with the tokenizers of a run to be resumed or started from."""
    if run is None and recipe.init.path is not None:
        initial = InitialModel(Path(recipe.init.path))
        return initial.run, initial.pretrained
    return run, None if run is None else run.pretrained_files()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a data file, which must be a regular file, since resuming reads it again."""
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is not a regular file; training reads its data more than once; save it to a file")
    try:
        return sha256(path)
    except CheckpointError as error:
        raise DataError(str(error)) from error


@dataclass(frozen=True)
class Outcome:
    """The reason why training ended, and the exit code of the command."""

    trainer: Trainer
    reason: str
    exit_code: int


def train_job(
    job: TrainingJob,
    run: RunDirectory,
    console: Console,
    *,
    resume: bool = False,
    task: Task | None = None,
    callbacks: Sequence[Callback] = (),
    loggers: Sequence[str] = (),
    communicator: Communicator | None = None,
) -> Outcome:
    """Train and show the progress.

    Args:
        job: Model and data.
        run: Run directory that was started.
        console: Console for the progress.
        resume: Continue from the last saved state, if there is one.
        task: Replaces the task of the job.
        callbacks: More callbacks.
        loggers: Tools to log to.
        communicator: The ranks; default this process alone.
    """
    config = job.recipe.training
    progress = TrainingProgress(console, config, unit=job.unit)
    task = task or job.task(communicator=communicator)
    callbacks = [progress, *callbacks, *(_make_logger(name, job, task, run) for name in dict.fromkeys(loggers))]
    trainer = Trainer(job.model, task, config, run, callbacks=callbacks, communicator=communicator)
    if resume and not run.last.exists():
        console.print("nothing was saved yet; starting from the first step")
    with progress:
        reason = trainer.run()
    exit_code = _EXIT_CODES.get(reason, 0)
    return Outcome(trainer, reason if progress.is_used or exit_code else f"nothing left to do: {reason}", exit_code)


def _make_logger(name: str, job: TrainingJob, task: Task, run: RunDirectory) -> Logger:
    options: dict[str, Any] = {"samples": lambda model: job.samples(model, task), "figures": job.figures}
    if name == "tensorboard":
        return TensorBoard(run.path / name, **options)
    options["run_name"] = run.path.resolve().name
    return MLflow(**options) if name == "mlflow" else WeightsAndBiases(directory=run.path, **options)


def print_summary(task: str, outcome: Outcome, run: RunDirectory, console: Console) -> None:
    """Print where the model is, its score, and the next command."""
    progress, best = outcome.trainer.progress, outcome.trainer.validator.best
    console.print(f"ended after step {outcome.trainer.loop.step:,}: {outcome.reason}")
    if best is None:
        console.print(f"the model is in {run.path}; it has not been validated")
    else:
        by_score = outcome.trainer.config.metric_for_best == "score"
        averaged = progress.averaged_score
        name = f"the best model (step {progress.best_step:,})" if averaged is None else "the averaged model"
        value = best[0] if averaged is None else averaged
        score = f"{outcome.trainer.task.metric} {value:.2f}" if by_score else f"loss {format_number(-value, 4)}"
        console.print(f"{name} is in {run.path}: validation {score}")
    path = shlex.quote(str(run.path))
    if outcome.exit_code:
        console.print(f"everything is saved; continue with: {program()} resume {path}")
    else:
        files = "" if COMMANDS[task] == "generate" else " --input FILE --output FILE"
        console.print(f"next: {program()} {COMMANDS[task]} --model {path}{files}")
