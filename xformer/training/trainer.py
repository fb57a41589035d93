"""The training loop: updates, validation, checkpoints."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from xformer.errors import CheckpointError, TrainingError
from xformer.host import available_threads, one_blas_thread, side_by_side
from xformer.models import Transformer
from xformer.namespace import Array, array_namespace, device
from xformer.random import Rng
from xformer.training.batches import Batch, TokenPairs, epochs, plan_batches, split_rows
from xformer.training.events import Progress, Update, Validation
from xformer.training.interrupt import StopRequest, stop_on_signals
from xformer.training.loss import translation_loss
from xformer.training.optimizers import Adam, AdamState
from xformer.training.parallel import ShardedGradient, shards_for
from xformer.training.recipe import TrainingSettings
from xformer.training.run_directory import RunDirectory
from xformer.training.schedules import schedule
from xformer.training.step import train_step

_LOG_EVERY = 10  # updates between lines of the log


class Trainer:
    """Trains one model in one directory.

    bleu: scores the model's translations of the validation set (None: validation is by loss alone).
    report: is told every Update and Validation. enough: says of a validation that training may end with it.
    """

    def __init__(
        self,
        model: Transformer,
        train: TokenPairs,
        valid: TokenPairs,
        settings: TrainingSettings,
        directory: RunDirectory,
        *,
        bleu: Callable[[Transformer], float] | None = None,
        report: Callable[[Update | Validation], None] = lambda event: None,
        enough: Callable[[Validation], bool] = lambda validation: False,
    ) -> None:
        self.model = model
        self.train_pairs, self.valid_pairs = train, valid
        self.settings, self.directory = settings, directory
        self.bleu, self.report, self.enough = bleu, report, enough
        self.optimizer = Adam()
        self.state: AdamState = self.optimizer.initial(model)
        self.progress = Progress()
        self._saved_step: int | None = None
        self.rng = Rng(settings.seed).fold("training")
        self.learning_rate = schedule(
            settings.schedule,
            factor=settings.learning_rate_factor,
            d_model=model.config.d_model,
            warmup_steps=settings.warmup_steps,
            total_steps=settings.max_updates,
        )
        self.shards = settings.shards or shards_for(model, available_threads())

    def resume(self) -> None:
        """Go on from the directory's last state; raises CheckpointError when it is not this run's."""
        self.model, self.state, values = self.directory.load_state(self.model, self.state)
        try:
            progress = Progress(**values)
        except TypeError as error:
            raise CheckpointError(
                f"{self.directory.last} is not a state of this version of xformer: {error}"
            ) from error
        self.progress = progress
        self._saved_step = progress.step
        self.directory.rewind_log(progress.step)

    def run(self) -> str:
        """Train until the end the settings name, or until Ctrl-C; returns why it ended.

        Everything is saved before it returns. Raises TrainingError, naming the update, when the loss is no longer
        finite: the last good state stays on disk.
        """
        objective = functools.partial(_mean_loss, smoothing=self.settings.label_smoothing)
        gradient = ShardedGradient(objective, self.shards, processes=True)
        limit = one_blas_thread() if self.shards > 1 else contextlib.nullcontext()
        began = time.monotonic() - 60.0 * self.progress.minutes
        with limit, contextlib.closing(gradient), stop_on_signals() as stop, warnings.catch_warnings():
            # Overflow shows in the loss, which is checked; a warning about it would come in the middle of a line.
            warnings.simplefilter("ignore", RuntimeWarning)
            reason = self._train(gradient, began, stop)
            if reason == _stopped(stop):
                self._save_unvalidated(began)
            elif self.progress.step != self.progress.validated_step:
                self._validate(began)
            return reason

    def _train(self, gradient: ShardedGradient, began: float, stop: StopRequest) -> str:
        """Make updates and validations until there is a reason to end."""
        batches = self._batches()
        while True:
            reason = self.finished(began) or _stopped(stop)
            if reason:
                return reason
            # Before the next update rather than after the last one, so that a run which ended in between makes up
            # for the validation when it is resumed.
            if self._validation_is_due() and self.enough(self._validate(began)):
                return "the goal is reached"
            started = time.monotonic()
            epoch, shards = next(batches)
            self._update(epoch, shards, gradient, began, started)

    def _validation_is_due(self) -> bool:
        step = self.progress.step
        return step > 0 and step % self.settings.validate_every == 0 and step != self.progress.validated_step

    def finished(self, began: float | None = None) -> str | None:
        """Why there is nothing left to do by the settings (None: there is); began: when the clock was at zero."""
        updates, minutes = self.settings.max_updates, self.settings.max_minutes
        if updates is not None and self.progress.step >= updates:
            return f"{updates} updates"
        so_far = self.progress.minutes if began is None else (time.monotonic() - began) / 60.0
        if minutes is not None and so_far >= minutes:
            return f"{minutes:g} minutes"
        return None

    def _batches(self) -> Iterator[tuple[int, list[Batch]]]:
        """Endless batches, each cut into shards; a resumed run skips what it has seen."""
        rng = self.rng.fold("batches")
        for epoch, rows in epochs(self.train_pairs, self.settings.batch_tokens, rng, skip=self.progress.step):
            yield epoch, [self._batch(self.train_pairs, part) for part in split_rows(rows, self.shards)]

    def _batch(self, pairs: TokenPairs, rows: list[int]) -> Batch:
        weight, c = self.model.source_embedding.weight, self.model.config
        ids = {"pad_id": c.pad_id, "bos_id": c.bos_id, "eos_id": c.eos_id}
        return Batch.make(pairs, rows, xp=array_namespace(weight), device=device(weight), **ids)

    def _update(self, epoch: int, shards: list[Batch], gradient: ShardedGradient, began: float, started: float) -> None:
        step = self.progress.step + 1
        try:
            result = train_step(
                self.model,
                self.state,
                shards,
                self.rng.fold("dropout", step),
                gradient=gradient,
                optimizer=self.optimizer,
                learning_rate=self.learning_rate(step),
                max_norm=self.settings.max_norm,
            )
        except TrainingError as error:
            raise TrainingError(f"update {step}: {error}; {self._kept()}") from None
        self.model, self.state = result.model, result.state
        tokens = sum(shard.num_tokens for shard in shards)
        now = time.monotonic()
        self.progress = replace(
            self.progress, step=step, epoch=epoch, tokens=self.progress.tokens + tokens, minutes=(now - began) / 60.0
        )
        update = Update(
            step=step,
            epoch=epoch,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=self.learning_rate(step),
            tokens=tokens,
            tokens_per_second=tokens / (now - started),
            minutes=self.progress.minutes,
        )
        if step % _LOG_EVERY == 0 or step == 1:
            self.directory.append_log({"event": "update", **asdict(update)})
        self.report(update)

    def _validate(self, began: float) -> Validation:
        """Measure, keep the model if it is the best so far, and save the state."""
        step, loss = self.progress.step, self.validation_loss()
        if not math.isfinite(loss):
            # The last update went wrong; it must not replace the state before it.
            raise TrainingError(
                f"the validation loss after update {step} is {loss}; lower learning_rate_factor or raise "
                f"warmup_steps; {self._kept()}"
            )
        if self.bleu is not None:
            self._save(began)  # translating takes a while, and whatever happens meanwhile, the updates are safe
        bleu = None if self.bleu is None else self.bleu(self.model)
        score = bleu if bleu is not None and self.settings.select_by == "bleu" else -loss
        best = self._is_best(score, loss)
        self.progress = replace(self.progress, validated_step=step)
        if best:
            self.progress = replace(self.progress, best_step=step, best_score=score, best_loss=loss)
            self.model.save(self.directory.model)
        self._save(began)
        validation = Validation(
            step=step,
            epoch=self.progress.epoch,
            loss=loss,
            perplexity=math.exp(min(loss, 700.0)),
            bleu=bleu,
            best=best,
            minutes=self.progress.minutes,
        )
        self.directory.append_log({"event": "validation", **asdict(validation)})
        self.report(validation)
        return validation

    def _is_best(self, score: float, loss: float) -> bool:
        """Compare with the best model so far; of equal scores (BLEU is 0 early on) the lower loss decides."""
        if self.progress.best_score is None or self.progress.best_loss is None:
            return True
        return (score, -loss) > (self.progress.best_score, -self.progress.best_loss)

    def validation_loss(self) -> float:
        """Mean cross-entropy of the validation set, in nats a token, without smoothing or dropout."""
        plan = plan_batches(self.valid_pairs, self.settings.batch_tokens, rng=None)
        parts = side_by_side(self._loss_of, [plan[start :: self.shards] for start in range(self.shards)])
        return sum(loss for loss, _ in parts) / max(1, sum(tokens for _, tokens in parts))

    def _loss_of(self, plan: list[list[int]]) -> tuple[float, int]:
        """Summed cross-entropy and number of tokens of some validation batches."""
        total, tokens = 0.0, 0
        for rows in plan:
            batch = self._batch(self.valid_pairs, rows)
            total += float(translation_loss(self.model, batch))
            tokens += batch.num_tokens
        return total, tokens

    def _save(self, began: float) -> None:
        self.progress = replace(self.progress, minutes=(time.monotonic() - began) / 60.0)
        self.directory.save_state(self.model, self.state, asdict(self.progress))
        self._saved_step = self.progress.step

    def _save_unvalidated(self, began: float) -> None:
        """Save what an interrupted run has, unless its last update ruined it."""
        for name, array in self.model.named_parameters():
            xp = array_namespace(array)
            if not bool(xp.all(xp.isfinite(array))):
                raise TrainingError(
                    f"after update {self.progress.step}, {name} is no longer finite; lower learning_rate_factor or "
                    f"raise warmup_steps; {self._kept()}"
                )
        if self.progress.best_score is None:
            self.model.save(self.directory.model)
        self._save(began)

    def _kept(self) -> str:
        if self._saved_step is None:
            return "no state had been saved yet"
        return f"the state of update {self._saved_step} is kept"


def _stopped(stop: StopRequest) -> str | None:
    return f"stopped by {stop.signal_name}" if stop else None


def _mean_loss(model: Transformer, shard: tuple[Batch, int], rng: Rng, *, smoothing: float) -> Array:
    """The shard's part of the mean loss of the batch that it belongs to."""
    batch, total = shard
    return translation_loss(model, batch, rng, label_smoothing=smoothing) / float(total)
