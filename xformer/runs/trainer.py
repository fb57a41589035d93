"""Training runs on disk: `fit`'s loop with validation, the best model, checkpoints and their average."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from xformer.random import Rng
from xformer.runs.checkpoints import Checkpoints, average_models
from xformer.runs.config import BaseTrainingConfig
from xformer.runs.run_directory import RunDirectory
from xformer.runs.tasks import Task
from xformer.training.checkpoint import TrainingFiles, save_parameters
from xformer.training.events import Checkpoint, End, Event, Start, Step, Validation
from xformer.training.fit import Callback, TrainingLoop
from xformer.training.interrupt import check_stop
from xformer.training.loss import mean_loss


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


@dataclass(frozen=True, slots=True)
class MissingCheckpoints(Event):
    """Kept models whose files are gone; averages leave them out.

    Attributes:
        checkpoints: Their steps.
    """

    name: ClassVar[str] = "missing_checkpoints"

    checkpoints: list[int]


@dataclass(frozen=True)
class Progress:
    """The state of a `Trainer` in addition to that of the loop.

    Attributes:
        validated_step: Step of the last validation.
        best_step: Step of the best model.
        best_score: Its score, or its negated loss.
        best_loss: Its loss.
        stale_validations: Number of validations since then.
        checkpoints: [step, score] of each model that is kept; the score of a model that was not validated is None.
        averaged_step: Step of the last average.
        averaged_score: Score of the average, if it became the best model.
    """

    validated_step: int = 0
    best_step: int = 0
    best_score: float | None = None
    best_loss: float | None = None
    stale_validations: int = 0
    checkpoints: list[list[Any]] = field(default_factory=list)
    averaged_step: int = 0
    averaged_score: float | None = None


class Trainer:
    """Train a model on a task, in a directory: a callback of `fit`'s loop that validates and keeps models.

    Args:
        model: The model, any Module.
        task: Data, loss and score (see `runs.tasks.Task`).
        config: The configuration. Without `learning_rate` it requires a model with `config.d_model`.
        directory: The directory; created if necessary.
        callbacks: Receive every event, before the trainer acts on it; see `xformer.training.fit.Callback`.

    Attributes:
        loop: The training loop.
        progress: The state in addition to that of the loop.
        missing_checkpoints: Steps of checkpoints that were missing when the run was resumed.
    """

    def __init__(
        self,
        model: Any,
        task: Task,
        config: BaseTrainingConfig,
        directory: RunDirectory,
        *,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.task, self.config, self.directory = task, config, directory
        self.progress = Progress()
        self.missing_checkpoints: list[int] = []
        best = config.average == "best"
        self.checkpoints = Checkpoints(directory.checkpoints, config.keep_checkpoints, best=best)
        d_model = getattr(getattr(model, "config", None), "d_model", None)
        self.loop = TrainingLoop(
            model,
            partial(task.loss, label_smoothing=config.label_smoothing, z_loss=config.z_loss),
            partial(_TaskBatches, task, Rng(config.seed).fold("training", "batches")),
            optimizer=config.make_optimizer(),
            learning_rate=config.make_schedule(d_model),
            max_grad_norm=config.max_grad_norm,
            steps=config.max_steps,
            callbacks=[*callbacks, self],
            run_dir=directory.path,
            seed=config.seed,
            grad_accumulation=config.grad_accumulation,
            precision=config.precision,
            data_parallel=config.data_parallel or None,
            save_every_minutes=config.save_every_minutes,
        )

    @property
    def model(self) -> Any:
        """The current model."""
        return self.loop.model

    def resume(self) -> None:
        """Load the directory's last state; raise CheckpointError if it is damaged or not of this run."""
        self.loop.resume()
        if not self.directory.model.exists():  # removed by the user: restore it, or let the next validation write one
            self.progress = replace(self.progress, averaged_step=0, averaged_score=None)
            if not self.directory.restore_best():
                self.progress = replace(
                    self.progress, validated_step=0, best_score=None, best_loss=None, stale_validations=0
                )
        existing, self.missing_checkpoints = self.checkpoints.existing(self.progress.checkpoints)
        self.progress = replace(self.progress, checkpoints=existing)

    def run(self) -> str:
        """Train until a limit of the configuration or a signal ends the run; return the reason.

        Everything is saved before it returns.

        Raises:
            TrainingError: If the loss is not finite; the last state stays on disk.
        """
        with TrainingFiles(self.directory.path).open():
            return self.loop.run()

    def is_done(self) -> bool:
        """Return whether nothing is left to do, validation and averaging included."""
        is_validated = self.loop.step == self.progress.validated_step
        return self.stop_reason() is not None and is_validated and not self._average_is_due()

    def stop_reason(self) -> str | None:
        """Return the reason why training is complete, or None."""
        if reason := self.loop.stop_reason():
            return reason
        if self.config.max_minutes is not None and self.loop.minutes >= self.config.max_minutes:
            return f"{self.config.max_minutes:g} minutes"
        patience = self.config.patience
        if patience is not None and self.progress.stale_validations >= patience:
            return f"no better model in {patience} validation{'s' if patience > 1 else ''}"
        return None

    def __call__(self, event: Event, loop: TrainingLoop) -> str | None:
        """Handle an event of the loop."""
        if isinstance(event, Start):
            self._start(event.step)
        if isinstance(event, Start | Step):
            # Also after the start: the validation of this step may have been interrupted.
            self._validate_or_keep(event.step)
            return self.stop_reason()
        if isinstance(event, End):
            self._end(event)
        if isinstance(event, Checkpoint) and self.config.keep_checkpoints:
            self.checkpoints.prune(self.progress.checkpoints)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return asdict(self.progress)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.progress = Progress(**state)

    def _start(self, step: int) -> None:
        if self.missing_checkpoints:
            self.loop.emit(MissingCheckpoints(step, self.missing_checkpoints))
        if self.stop_reason() is None:
            self.directory.restore_best()  # discard the average of an earlier end: the run continues
            self.progress = replace(self.progress, averaged_step=0, averaged_score=None)

    def _validate_or_keep(self, step: int) -> None:
        if step == self.progress.validated_step:
            return
        check_stop()
        if step % self.config.validate_every == 0:
            self._validate()
        elif kept := self._keep_checkpoint(None):
            self.loop.emit(kept)

    def _end(self, event: End) -> None:
        if event.is_interrupted:
            if self.progress.best_score is None:
                save_parameters(self.loop.model, self.directory.model)
            return
        if event.step != self.progress.validated_step:
            self._validate()
        if self._average_is_due():
            self.loop.save()
            self._average()

    def _validate(self) -> None:
        """Evaluate the model, keep it if it is the best so far, and save the state."""
        step, model = self.loop.step, self.loop.model
        loss = self.validation_loss(model)
        if not math.isfinite(loss):  # keep the state before this update
            raise self.loop.diverged(f"the validation loss after step {step} is {loss}")
        self.loop.save()  # first, since computing the score takes a while
        metric_value = None if self.task.score is None else self.task.score(model)
        score = self._score_of(loss, metric_value)
        is_best = self._is_best(score, loss)
        stale = 0 if is_best else self.progress.stale_validations + 1
        self.progress = replace(self.progress, validated_step=step, stale_validations=stale)
        if is_best:
            self.progress = replace(self.progress, best_step=step, best_score=score, best_loss=loss)
            save_parameters(model, self.directory.model)
        kept = self._keep_checkpoint(score)
        self.loop.save()
        if kept:
            self.loop.emit(kept)
        self.loop.emit(self._describe(Validation, loss, metric_value, is_best))

    def _average(self) -> None:
        """Evaluate the average of the kept models, which becomes the model if it is better than the best one."""
        steps = [step for step, _ in self.progress.checkpoints]
        model = average_models([self.checkpoints.path(step) for step in steps], like=self.loop.model)
        save_parameters(model, self.directory.averaged)
        loss = self.validation_loss(model)
        metric_value = None if self.task.score is None else self.task.score(model)
        score = self._score_of(loss, metric_value)
        is_best = math.isfinite(loss) and self._is_best(score, loss)
        if is_best:
            self.directory.back_up_best()
            save_parameters(model, self.directory.model)
        averaged_score = score if is_best else None
        self.progress = replace(self.progress, averaged_step=self.loop.step, averaged_score=averaged_score)
        self.loop.save()
        self.loop.emit(self._describe(partial(Average, steps=steps), loss, metric_value, is_best))

    def _average_is_due(self) -> bool:
        is_requested = self.config.average != "none" and bool(self.progress.checkpoints)
        return is_requested and self.progress.averaged_step != self.loop.step

    def _describe(
        self, event: Callable[..., Validation], loss: float, metric_value: float | None, is_best: bool
    ) -> Validation:
        return event(
            step=self.loop.step,
            epoch=self.loop.epoch,
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            score=metric_value,
            metric=None if metric_value is None else self.task.metric,
            best=is_best,
            minutes=self.loop.minutes,
        )

    def _keep_checkpoint(self, score: float | None) -> ModelCheckpoint | None:
        """Keep the model and return the event, if a checkpoint is due; the next saved state contains the entry."""
        step, entries = self.loop.step, self.progress.checkpoints
        if not self.config.keep_checkpoints or step == 0 or step % self.config.checkpoint_interval:
            return None
        if score is None and any(entry[0] == step for entry in entries):
            return None  # kept before the run was interrupted here
        entries = self.checkpoints.add(entries, step, score, self.loop.model)
        self.progress = replace(self.progress, checkpoints=entries)
        return ModelCheckpoint(step, score, [entry[0] for entry in entries])

    def _score_of(self, loss: float, metric_value: float | None) -> float:
        return metric_value if metric_value is not None and self.config.metric_for_best == "score" else -loss

    def _is_best(self, score: float, loss: float) -> bool:
        """Compare with the best model so far; the lower loss decides between equal scores (BLEU is 0 early on)."""
        if self.progress.best_score is None or self.progress.best_loss is None:
            return True
        return (score, -loss) > (self.progress.best_score, -self.progress.best_loss)

    def validation_loss(self, model: Any) -> float:
        """Return the mean cross-entropy of the validation set, in nats per token, without smoothing or dropout."""
        return mean_loss(self.task.loss, model, self.task.validation_batches(), self.loop.num_workers)


class _TaskBatches:
    """The batches of a task, beginning with batch `start`, and their epoch."""

    def __init__(self, task: Task, rng: Rng, start: int) -> None:
        self._batches = task.batches(rng, skip=start)
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        for epoch, batch in self._batches:
            self.epoch = epoch
            yield batch
