"""Training runs on disk: `fit`'s loop with validation, the best model, checkpoints and their average."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from xformer.backends import to_host
from xformer.config import field_names
from xformer.distributed import Communicator, ShardedOptimizer, SingleProcess, broadcast
from xformer.errors import CheckpointError, ConfigError, ShapeError
from xformer.families.run_directory import RunDirectory
from xformer.io import load_arrays, restore_like, save_arrays
from xformer.layers.weights import has_adapters, merge_lora
from xformer.models import LanguageModel
from xformer.random import Rng
from xformer.runs.tasks import Task
from xformer.training.callbacks import Validator, early_stopping, time_limit
from xformer.training.checkpoint import save_parameters
from xformer.training.data_parallel import is_numpy
from xformer.training.events import Checkpoint, End, Event, Start, Step, Validation
from xformer.training.fit import Callback, TrainingLoop
from xformer.training.inputs import FitConfig
from xformer.training.loss import mean_loss
from xformer.tree import Module, replace

_LOSS_OPTIONS = ("label_smoothing", "z_loss", "load_balancing")


@dataclass(frozen=True, slots=True)
class ModelCheckpoint(Event):
    """A model was kept in checkpoints/.

    Attributes:
        score: Its validation score, or None if it was not validated.
        kept: Steps of all models that are kept.
    """

    name: ClassVar[str] = "checkpoint"

    score: float | None
    kept: list[int]


@dataclass(frozen=True, slots=True)
class Average(Validation):
    """The validation of the average of checkpoints.

    Attributes:
        steps: Steps of the averaged models.
    """

    name: ClassVar[str] = "average"

    steps: list[int] = field(default_factory=list)


@dataclass
class Progress:
    """The state of a `Trainer` in addition to that of the loop and the validator.

    Attributes:
        checkpoints: [step, score] of each model that is kept; the score of a model that was not validated is None.
        averaged_step: Step of the last average.
        averaged_score: Score of the average, if it became the best model.
        first_loss: Validation loss of the model that the run started from.
    """

    checkpoints: list[list[Any]] = field(default_factory=list)
    averaged_step: int = 0
    averaged_score: float | None = None
    first_loss: float | None = None


class Trainer:
    """Train a model on a task, in a directory.

    The trainer adds validation and early stopping to `fit`'s loop, and is itself a callback: it keeps the best model,
    checkpoints and their average.

    Args:
        task: Recipe, model, data, loss and score (see `runs.tasks.Task`).
        directory: The directory; created if necessary.
        callbacks: Receive every event, before the trainer acts on it; see `xformer.training.fit.Callback`.
        communicator: The ranks that train together; rank 0 alone writes to the directory. Default: this process alone.

    Attributes:
        loop: The training loop.
        validator: The callback that validates the model.
        progress: The state in addition to theirs.
    """

    def __init__(
        self,
        task: Task,
        directory: RunDirectory,
        *,
        callbacks: Sequence[Callback] = (),
        communicator: Communicator | None = None,
    ) -> None:
        model, config = task.model, task.recipe.training
        self.task, self.config, self.directory = task, config, directory
        self.communicator = communicator or SingleProcess()
        self.communicator.communication_dtype = config.communication_dtype
        self.communicator.overlaps = config.overlap_communication
        optimizer = config.make_optimizer()
        if config.shard_optimizer:
            optimizer = ShardedOptimizer(optimizer, self.communicator)
        self.progress = Progress()
        self.checkpoints = Checkpoints(directory.checkpoints, config.keep_checkpoints, best=config.average == "best")
        self.validator = Validator(
            config.validate_every,
            loss=lambda model, loop: self.validation_loss(model),
            score=None if task.metric is None else lambda model: task.score(model, self.communicator),
            metric=task.metric,
            by_loss=config.metric_for_best == "loss",
            trial=lambda model: task.score(model, self.communicator, is_trial=True),
            at_start=task.metric is None and task.recipe.init.path is not None,
        )
        limits: list[Callback] = [] if config.patience is None else [early_stopping(config.patience)]
        limits += [] if config.max_minutes is None else [time_limit(config.max_minutes)]
        self.loop = TrainingLoop(
            model,
            partial(task.loss, **{name: getattr(config, name) for name in _LOSS_OPTIONS}),
            partial(_TaskBatches, task, Rng(config.seed).fold_in("training", "batches")),
            optimizer=optimizer,
            learning_rate=config.make_schedule(model.config.d_model),
            steps=config.max_steps or math.inf,
            callbacks=[*callbacks, self.validator, *limits, self],
            keep_best=True,
            run_dir=directory.path,
            communicator=self.communicator,
            # The shapes of pairs repeat if they are padded for it. On NumPy, programs keep the memory of each shape.
            jit=(isinstance(model, LanguageModel) and not (has_adapters(model) and is_numpy(model))) or None,
            **{name: getattr(config, name) for name in field_names(FitConfig)},
        )

        self.loop.save_best = self._save_best

    @property
    def model(self) -> Any:
        """The current model."""
        return self.loop.model

    def run(self) -> str:
        """Train, see `TrainingLoop.run`."""
        return self.loop.run()

    def validation_loss(self, model: Any) -> float:
        """Return the mean cross-entropy of the validation set, in nats per token, without smoothing or dropout."""
        loss, batches = self.task.loss, self.task.validation_batches()
        return mean_loss(loss, model, batches, self.loop.num_workers, communicator=self.communicator)

    def __call__(self, event: Event, loop: TrainingLoop) -> None:
        """Keep models: the best one, checkpoints, and at the end their average."""
        if self.communicator.rank == 0:
            self._keep_models(event, loop)
        if type(event) is Validation:
            loop.save()
        elif isinstance(event, End) and not event.is_interrupted:
            self._average()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return asdict(self.progress)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; the validator's must have been restored before."""
        self.loop.best_step = state.pop("best_step", self.loop.best_step)  # of a run that an earlier version started
        self.progress = progress = Progress(**state)
        if self.communicator.rank == 0:
            progress.checkpoints = [entry for entry in progress.checkpoints if self.checkpoints.path(entry[0]).exists()]
            if not self.directory.model.exists():  # removed by the user: restore it, or let a validation write it
                progress.averaged_step, progress.averaged_score = 0, None
                if not self.directory.restore_best():
                    self.validator.step, self.validator.best = 0, None
        self.validator.load_state_dict(self.communicator.all_gather(self.validator.state_dict())[0])

    def _keep_models(self, event: Event, loop: TrainingLoop) -> None:
        """Write the models that an event makes due."""
        if isinstance(event, Start) and loop.stop_reason() is None:
            self.directory.restore_best()  # discard the average of an earlier end: the run continues
            self.progress.averaged_step, self.progress.averaged_score = 0, None
        elif type(event) is Validation:
            if event.step == 0:
                self.progress.first_loss = event.loss
            self._keep_checkpoint(self.validator.rank(event)[0])
        elif isinstance(event, Step) and event.step != self.validator.step:
            self._keep_checkpoint(None)
        elif isinstance(event, Checkpoint) and self.config.keep_checkpoints:
            self.checkpoints.prune(self.progress.checkpoints)
        elif isinstance(event, End) and event.is_interrupted and self.validator.best is None:
            self._save_best(loop.model)

    def _save_best(self, model: Any) -> None:
        """Write the best model, and its adapters, if any."""
        model._save_merged(self.directory.model)
        if has_adapters(model):
            save_arrays(self.directory.adapters, dict(model.named_trainable_parameters()), {"format": "xformer"})

    def _keep_checkpoint(self, score: float | None) -> None:
        """Keep the model if a checkpoint is due; the next saved state contains the entry."""
        step = self.loop.step
        if not self.config.keep_checkpoints or step == 0 or step % self.config.checkpoint_interval:
            return
        entries = self.checkpoints.add(self.progress.checkpoints, step, score, _merged(self.loop.model))
        self.progress.checkpoints = entries
        self.loop.emit(ModelCheckpoint(step, score, [entry[0] for entry in entries]))

    def _average(self) -> None:
        """Evaluate the average of the kept models, which becomes the model if it is better than the best one."""
        self.progress = progress = Progress(**self.communicator.all_gather(self.state_dict())[0])
        steps, writes = [step for step, _ in progress.checkpoints], self.communicator.rank == 0
        if self.config.average == "none" or not steps or progress.averaged_step == self.loop.step:
            return
        model = _merged(self.loop.model)
        if writes:
            model = average_models([self.checkpoints.path(step) for step in steps], like=model)
            save_parameters(model, self.directory.averaged)
        model = broadcast(self.communicator, model)
        event = self.validator.evaluate(model, self.loop, partial(Average, steps=steps))
        if event.best and writes:
            self.directory.back_up_best()
            save_parameters(model, self.directory.model)
        progress.averaged_step = self.loop.step
        progress.averaged_score = self.validator.rank(event)[0] if event.best else None
        self.loop.save()
        self.loop.emit(event)


def _merged(model: Any) -> Any:
    """Return a model with its adapters, if any, merged into its weights."""
    return merge_lora(model) if has_adapters(model) else model


class _TaskBatches:
    """The batches of a task, beginning with batch `start`, and their epoch."""

    def __init__(self, task: Task, rng: Rng, start: int) -> None:
        self._batches = task.batches(rng, skip=start)
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for epoch, batch in self._batches:
            self.epoch = epoch
            yield batch


class Checkpoints:
    """The files step-<n>.safetensors of a run: the most recent models, or the best ones.

    The caller keeps the list of entries [step, score] and saves it with the training state, since files on disk may be
    newer than the state.

    Args:
        directory: Directory of the files.
        max_to_keep: Number of models to keep.
        best: Keep the models with the best scores instead of the most recent ones.
    """

    def __init__(self, directory: Path, max_to_keep: int, *, best: bool) -> None:
        self.directory, self.max_to_keep, self.best = directory, max_to_keep, best

    def path(self, step: int) -> Path:
        """Return the path of the model after this step."""
        return self.directory / f"step-{step}.safetensors"

    def add(self, entries: Sequence[list[Any]], step: int, score: float | None, model: Any) -> list[list[Any]]:
        """Save a model if it belongs to those to keep, and return the new entries; `prune` removes the other files."""
        candidates = [*(entry for entry in entries if entry[0] != step), [step, score]]
        if self.best:
            candidates.sort(key=lambda entry: (entry[1], entry[0]))
        kept = sorted(candidates[-self.max_to_keep :])
        if [step, score] in kept:
            save_parameters(model, self.path(step))
        return kept

    def prune(self, entries: Sequence[list[Any]]) -> None:
        """Remove all other files. Call it once the entries are saved."""
        names = {self.path(step).name for step, _ in entries}
        for path in self.directory.glob("step-*.safetensors"):
            if path.name not in names:
                with contextlib.suppress(OSError):  # an extra file does no harm
                    path.unlink()


def average_models(models: Sequence[Any], *, like: Any = None) -> Any:
    """Return the arithmetic mean of models, summed in float64.

    Args:
        models: Models, or the files they were saved in, which are read one after the other.
        like: A model of the same structure, whose backend, dtype and configuration the result has; default the first
            model.

    Raises:
        ConfigError: If there are no models, or files without `like`.
        ShapeError: If the parameters differ in name or shape.
        CheckpointError: If a file cannot be read.
    """
    if not models:
        raise ConfigError("models is empty; expected at least one model to average")
    like = models[0] if like is None else like
    if not isinstance(like, Module):
        raise ConfigError(f"{like} is a file; pass like=, a model of the same structure")
    shapes = {name: tuple(array.shape) for name, array in like.named_arrays()}
    total: dict[str, Any] = {}
    for number, model in enumerate(models, start=1):
        arrays = _arrays_of(model)
        name = f"model {number}" if isinstance(model, Module) else str(model)
        found = {key: tuple(array.shape) for key, array in arrays.items()}
        for key in sorted(found.keys() | shapes.keys()):
            if found.get(key) != shapes.get(key):
                own, other = (str(each.get(key, "absent")) for each in (found, shapes))
                raise ShapeError(f"{key} of {name} is {own}; expected {other}; models must have the same structure")
        for key, _ in like.named_parameters():
            wide = arrays[key].astype("float64")
            total[key] = total[key] + wide if key in total else wide
    means = {key: array / len(models) for key, array in total.items()}
    current = dict(like.named_arrays())
    return replace(like, current | restore_like(means, {key: current[key] for key in means}))


def _arrays_of(model: Any) -> dict[str, Any]:
    """Return the parameters of a model, or of a file, as NumPy arrays."""
    if isinstance(model, Module):
        return {name: to_host(array) for name, array in model.named_arrays()}
    arrays, metadata = load_arrays(model)
    if metadata.get("format") != "xformer":
        raise CheckpointError(f"{os.fspath(model)} is not an xformer model; expected a file that model.save() wrote")
    return arrays
