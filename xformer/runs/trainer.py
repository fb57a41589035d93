"""The training loop: updates, validation, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from xformer.errors import CheckpointError, TrainingError
from xformer.memory import enough_memory
from xformer.random import Rng
from xformer.runs.checkpoints import Checkpoints, average_models
from xformer.runs.config import LoopSettings
from xformer.runs.run_directory import RunDirectory
from xformer.runs.tasks import Task
from xformer.threads import blas_threads, num_threads
from xformer.training import advice
from xformer.training.data_parallel import ShardedGradient, shards_for
from xformer.training.events import Average, Progress, Update, Validation
from xformer.training.interrupt import Stopped, check_stop, stop_on_signals
from xformer.training.loss import mean_loss, weighted_loss
from xformer.training.precision import UNSCALED, GradScaler, autocast, check_precision
from xformer.training.schedules import schedule
from xformer.training.step import not_finite, train_step

_LOG_EVERY = 10  # updates between lines of the log


class Trainer:
    """Trains one model in one directory.

    task: the data, the objective, and what makes a model good (tasks.py). report: is told every Update and
    Validation. enough: says of a validation that training may end with it.
    """

    def __init__(
        self,
        model: Any,
        task: Task,
        settings: LoopSettings,
        directory: RunDirectory,
        *,
        report: Callable[[Update | Validation], None] = lambda event: None,
        enough: Callable[[Validation], bool] = lambda validation: False,
    ) -> None:
        check_precision(settings.precision, model)
        self.model, self.task, self.settings, self.directory = model, task, settings, directory
        self.report, self.enough = report, enough
        self.optimizer = settings.make_optimizer()
        with enough_memory("the optimizer's state", lambda most: advice.smaller_model(settings)):
            self.state = self.optimizer.init(model)
        self.progress = Progress(loss_scale=GradScaler.init(settings.precision))
        self.lost: list[int] = []
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self.rng = Rng(settings.seed).fold("training")
        self.learning_rate = schedule(settings.schedule, **settings.schedule_settings(model.config.d_model))
        best = settings.average == "best"
        self.checkpoints = Checkpoints(directory.checkpoints, settings.keep_checkpoints, best=best)
        self.shards = settings.shards or shards_for(model, num_threads())

    def resume(self) -> None:
        """Go on from the directory's last state; raises CheckpointError when it is not this run's.

        `lost` names the updates whose checkpoints are gone: the mean does without them.
        """
        self.model, self.state, values = self.directory.load_state(self.model, self.state)
        try:
            progress = Progress(**values)
        except TypeError as error:
            last = self.directory.last
            raise CheckpointError(f"{last} is not a state of this version of xformer: {error}") from error
        if (progress.loss_scale == UNSCALED) != (self.progress.loss_scale == UNSCALED):  # of another precision
            progress = replace(progress, loss_scale=self.progress.loss_scale)
        if not self.directory.model.exists():  # removed: the mean, or what the next validation is to find anew
            progress = replace(progress, averaged_step=0, averaged_score=None)
            if not self.directory.restore_best():
                progress = replace(progress, validated_step=0, best_score=None, best_loss=None, stale_validations=0)
        there, self.lost = self.checkpoints.there(progress.checkpoints)
        self.progress, self._saved_step = replace(progress, checkpoints=there), progress.step
        self.directory.rewind_log(progress.step)
        if self.lost:
            self._log({"event": "lost", "step": progress.step, "checkpoints": self.lost})

    def run(self) -> str:
        """Train until the end the settings name, or until Ctrl-C; returns why it ended.

        Everything is saved before it returns. Raises TrainingError, naming the update, when the loss is no longer
        finite: the last good state stays on disk.
        """
        settings = self.settings
        smoothed = functools.partial(self.task.loss, label_smoothing=settings.label_smoothing, z_loss=settings.z_loss)
        objective = functools.partial(weighted_loss, loss=autocast(settings.precision, smoothed))
        workers = min(self.shards, num_threads())  # a run goes on with its shards, wherever it does
        gradient = ShardedGradient(objective, workers, processes=True)
        limit = blas_threads(1 if self.shards > 1 else num_threads())
        began = time.monotonic() - 60.0 * self.progress.minutes
        with limit, contextlib.closing(gradient), stop_on_signals(), warnings.catch_warnings():
            # Overflow shows in the loss, which is checked; a warning about it would come in the middle of a line.
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                reason = self._train(gradient, began)
                if self.progress.step != self.progress.validated_step:
                    self._validate(began)
                else:
                    self._save(began)  # the minutes since the last one
                if self._average_is_due():
                    self._average(began)
            except Stopped as stopped:
                self._save_unvalidated(began)
                reason = str(stopped)
            return reason

    def _train(self, gradient: ShardedGradient, began: float) -> str:
        """Make updates and validations until there is a reason to end; raises Stopped."""
        if self.finished(began) is None:
            self.directory.restore_best()  # an earlier end was made of averages, which have no part in going on
            self.progress = replace(self.progress, averaged_step=0, averaged_score=None)
        batches = self.task.batches(
            self.rng.fold("batches"), skip=self.progress.step * self.settings.accumulate, shards=self.shards
        )
        while True:
            if reason := self.finished(began):
                return reason
            check_stop()
            # Before the next update rather than after the last one, so that a run which ended in between makes up
            # for the validation when it is resumed.
            if self.progress.step != self.progress.validated_step:
                if self.progress.step % self.settings.validate_every == 0:
                    if self.enough(self._validate(began)):
                        return "the goal is reached"
                    continue
                self._log(*self._keep_checkpoint(None))
            if time.monotonic() - self._saved_at >= 60.0 * self.settings.save_every_minutes:
                self._save_unvalidated(began)
            started = time.monotonic()
            drawn = [next(batches) for _ in range(self.settings.accumulate)]
            with enough_memory(f"update {self.progress.step + 1}", self._less_memory):
                self._update(drawn[-1][0], [shards for _, shards in drawn], gradient, began, started)

    def finished(self, began: float | None = None) -> str | None:
        """Why there is nothing left to do by the settings (None: there is); began: when the clock was at zero."""
        minutes = self.progress.minutes if began is None else (time.monotonic() - began) / 60.0
        return self.settings.end_of(self.progress.step, minutes, self.progress.stale_validations)

    def done(self) -> str | None:
        """Why there is nothing left to do at all, validation and averaging included (None: there is)."""
        validated = self.progress.step == self.progress.validated_step
        return self.finished() if validated and not self._average_is_due() else None

    def _update(
        self, epoch: int, batches: Sequence[list[Any]], gradient: ShardedGradient, began: float, started: float
    ) -> None:
        step, scale = self.progress.step + 1, self.progress.loss_scale
        try:
            result = train_step(
                self.model,
                self.state,
                batches,
                self.rng.fold("dropout", step),
                gradient=gradient,
                optimizer=self.optimizer,
                learning_rate=self.learning_rate(step),
                max_grad_norm=self.settings.max_grad_norm,
                scale=scale,
            )
        except TrainingError as error:
            raise self._diverged(f"update {step}: {error}") from None
        self.model, self.state = result.model, result.state
        tokens = sum(shard.num_tokens for shards in batches for shard in shards)
        now = time.monotonic()
        self.progress = replace(self.progress, step=step, epoch=epoch, loss_scale=result.scale)
        self.progress = replace(self.progress, tokens=self.progress.tokens + tokens, minutes=(now - began) / 60.0)
        if result.scale.value < scale.value:
            self._log({"event": "skipped", "step": step, "loss_scale": scale.value})
            return
        update = Update(
            step=step,
            epoch=epoch,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=self.learning_rate(step),
            tokens=tokens,
            tokens_per_second=tokens / (now - started),
            minutes=self.progress.minutes,
            loss_scale=scale.value,
        )
        if step % _LOG_EVERY == 0 or step == 1:
            self._log({"event": "update", **asdict(update)})
        self.report(update)

    def _validate(self, began: float) -> Validation:
        """Measure, keep the model if it is the best so far, and save the state."""
        step = self.progress.step
        with enough_memory(f"the validation after update {step}", self._less_memory):
            loss = self.validation_loss(self.model)
        if not math.isfinite(loss):
            # The last update went wrong; it must not replace the state before it.
            raise self._diverged(f"the validation loss after update {step} is {loss}; lower the learning rate")
        self._save(began)  # before the model, and before translating, which takes a while: the updates are safe
        quality = None if self.task.score is None else self.task.score(self.model)
        score = self._score_of(loss, quality)
        best = self._is_best(score, loss)
        stale = 0 if best else self.progress.stale_validations + 1
        self.progress = replace(self.progress, validated_step=step, stale_validations=stale)
        if best:
            self.progress = replace(self.progress, best_step=step, best_score=score, best_loss=loss)
            self.model.save(self.directory.model)
        kept = self._keep_checkpoint(score)
        self._save(began)
        validation = Validation(**self._described(loss, quality, best))
        self._log(*kept, {"event": "validation", **asdict(validation)})
        self.report(validation)
        return validation

    def _score_of(self, loss: float, quality: float | None) -> float:
        return quality if quality is not None and self.settings.metric_for_best == "score" else -loss

    def _described(self, loss: float, quality: float | None, best: bool) -> dict[str, Any]:
        """The fields of a Validation."""
        measured = {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "score": quality, "best": best}
        progress, metric = self.progress, None if quality is None else self.task.metric
        where = {"step": progress.step, "epoch": progress.epoch, "minutes": progress.minutes}
        return {**where, **measured, "metric": metric}

    def _keep_checkpoint(self, score: float | None) -> list[dict[str, Any]]:
        """Keep the model, if its turn has come; the next saved state will know of it. Returns what to log."""
        step = self.progress.step
        if not self.settings.keep_checkpoints or step == 0 or step % self.settings.checkpoint_interval:
            return []
        if score is None and any(entry[0] == step for entry in self.progress.checkpoints):
            return []  # kept before the run was stopped here
        kept = self.checkpoints.add(self.progress.checkpoints, step, score, self.model)
        self.progress = replace(self.progress, checkpoints=kept)
        return [{"event": "checkpoint", "step": step, "score": score, "kept": [entry[0] for entry in kept]}]

    def _average_is_due(self) -> bool:
        wanted = self.settings.average != "none" and bool(self.progress.checkpoints)
        return wanted and self.progress.averaged_step != self.progress.step

    def _average(self, began: float) -> None:
        """Measure the mean of the models that were kept; it becomes the model if it is better than the best."""
        steps = [step for step, _ in self.progress.checkpoints]
        model = average_models([self.checkpoints.path(step) for step in steps], like=self.model)
        model.save(self.directory.averaged)
        loss = self.validation_loss(model)
        quality = None if self.task.score is None else self.task.score(model)
        score = self._score_of(loss, quality)
        better = math.isfinite(loss) and self._is_best(score, loss)
        if better:
            self.directory.replace_best(model)
        self.progress = replace(
            self.progress, averaged_step=self.progress.step, averaged_score=score if better else None
        )
        self._save(began)
        average = Average(**self._described(loss, quality, better), updates=steps)
        self._log({"event": "average", **asdict(average)})
        self.report(average)

    def _is_best(self, score: float, loss: float) -> bool:
        """Compare with the best model so far; of equal scores (BLEU is 0 early on) the lower loss decides."""
        if self.progress.best_score is None or self.progress.best_loss is None:
            return True
        return (score, -loss) > (self.progress.best_score, -self.progress.best_loss)

    def validation_loss(self, model: Any) -> float:
        """Mean cross-entropy of the validation set, in nats a token, without smoothing or dropout."""
        return mean_loss(self.task.loss, model, self.task.validation_batches(), self.shards)

    def _log(self, *events: dict[str, Any]) -> None:
        for event in events:
            self.directory.append_log(event)

    def _save(self, began: float) -> None:
        self.progress = replace(self.progress, minutes=(time.monotonic() - began) / 60.0)
        self.directory.save_state(self.model, self.state, asdict(self.progress))
        self._saved_step, self._saved_at = self.progress.step, time.monotonic()
        if self.settings.keep_checkpoints:
            self.checkpoints.prune(self.progress.checkpoints)

    def _save_unvalidated(self, began: float) -> None:
        """Save what there is between validations, unless the last update ruined it."""
        step, name = self.progress.step, not_finite(self.model)
        if name:
            raise self._diverged(f"after update {step}, {name} is no longer finite; lower the learning rate")
        self._save(began)
        if self.progress.best_score is None:
            self.model.save(self.directory.model)

    def _diverged(self, what: str) -> TrainingError:
        return TrainingError(f"{what}, {advice.more_careful(self.settings)}; {advice.kept(self._saved_step)}")

    def _less_memory(self, most: float | None) -> str:
        return f"{advice.less_memory(self.settings, self.model, self.state, most)}; {advice.kept(self._saved_step)}"
