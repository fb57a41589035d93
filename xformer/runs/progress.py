"""Terminal output of training: its progress and its result."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any, Self

from xformer.runs.config import BaseTrainingConfig
from xformer.runs.console import format_duration, format_number, progress_line
from xformer.runs.trainer import Average, Trainer
from xformer.training import Event, Plan, Start, Step, Validation
from xformer.training.events import format_limit

_SMOOTHING = 0.9  # of the loss and the speed shown


class TrainingProgress:
    """A callback that shows steps and validations: in a progress bar on a terminal, otherwise every ten seconds.

    Args:
        console: Console to print on.
        config: Configuration of the training, which says when it ends.
        unit: Unit of the speed shown.
    """

    def __init__(self, console: Any, config: BaseTrainingConfig, *, unit: str = "target tokens") -> None:
        self.console, self.config, self.unit = console, config, unit
        self._first_step: int | None = None
        self._start_time = time.monotonic()
        self._loss = self._speed = 0.0
        self._num_smoothed = 0
        self._validation = ""
        self._stack = contextlib.ExitStack()
        self.is_used = False  # until the first step or validation

    def __enter__(self) -> Self:
        self._start_time = time.monotonic()
        endless = self.config.max_steps is None and self.config.max_minutes is None
        line = progress_line(self.console, "first step ...", None if endless else 1.0)
        self._show = self._stack.enter_context(line)
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):
            self._stack.close()

    def __call__(self, event: Event, loop: object = None) -> None:
        """Show an event. Training continues if the terminal or pipe has been closed."""
        self.is_used |= isinstance(event, Step | Validation)
        with contextlib.suppress(OSError):
            if isinstance(event, Start) and event.step:
                self.console.print(f"resuming after step {event.step:,}")
            elif isinstance(event, Validation):
                score = "" if event.score is None else f", {event.metric} {event.score:.2f}"
                self._validation = f"valid: perplexity {format_number(event.perplexity)}{score}"
                self.console.print(describe_validation(event))
            elif isinstance(event, Plan):
                self.console.print(describe_plan(event))
            elif isinstance(event, Step):
                self._show_step(event, getattr(loop, "max_steps", self.config.max_steps or math.inf))

    def _show_step(self, step: Step, max_steps: float) -> None:
        self._num_smoothed += 1
        decay = min(_SMOOTHING, 1.0 - 1.0 / self._num_smoothed)
        self._loss = decay * self._loss + (1.0 - decay) * step.loss
        self._speed = decay * self._speed + (1.0 - decay) * step.tokens_per_second
        fraction, seconds_left = self._remaining(step, max_steps)
        text = f"step {step.step:,}  loss {format_number(self._loss, 3)}  {self._speed:,.0f} {self.unit}/s"
        if seconds_left is not None:
            text += f"  {format_duration(seconds_left)} left"
        validates = step.step % self.config.validate_every == 0 or fraction == 1.0
        if validates:
            text += "  validating ..."
        self._show(text, completed=fraction, at_once=validates, details=self._validation)

    def _remaining(self, step: Step, max_steps: float) -> tuple[float, float | None]:
        """Return the completed fraction of the run and the seconds left, by the limit that is reached first."""
        if self._first_step is None:  # it does not count: jit traces, and JAX compiles
            self._first_step, self._start_time = step.step, time.monotonic()
        minutes = self.config.max_minutes or math.inf
        left, num_steps = [60.0 * (minutes - step.minutes)], step.step - self._first_step
        if num_steps > 0 and max_steps < math.inf:
            left.append((time.monotonic() - self._start_time) / num_steps * (max_steps - step.step))
        fraction = min(1.0, max(step.step / max_steps, step.minutes / minutes))
        return fraction, None if min(left) == math.inf else max(0.0, min(left))


def describe_plan(plan: Plan) -> str:
    """Return one line about the number of steps that a time limit has fixed."""
    made_for = f"; the recipe is made for {plan.max_steps:,}" if plan.steps < (plan.max_steps or 0) else ""
    fit = f"{plan.steps:,} steps fit into {format_limit(plan.minutes)}{made_for}"
    return f"{fit}; without a limit, --max-steps {plan.steps} repeats the run"


def describe_validation(validation: Validation) -> str:
    """Return one line about a validation."""
    score = "" if validation.score is None else f"  {validation.metric} {validation.score:.2f}"
    is_of_words = validation.metric in (None, "BLEU", "ROUGE")
    perplexity = f"  perplexity {format_number(validation.perplexity)}" if is_of_words else ""
    best = "  (best so far)" if validation.best else ""
    averaged = f"average of {len(validation.steps)} checkpoints: " if isinstance(validation, Average) else ""
    return (
        f"{averaged}validation after step {validation.step:,}  epoch {validation.epoch + 1}  "
        f"{format_duration(60.0 * validation.minutes)}  loss {format_number(validation.loss, 4)}"
        f"{perplexity}{score}{best}"
    )


def summarize(trainer: Trainer, reason: str) -> Iterator[str]:
    """Yield lines about why training ended, where the model is, and its score."""
    progress, best, path = trainer.progress, trainer.validator.best, trainer.directory.path
    yield f"ended after step {trainer.loop.step:,}: {reason}"
    if best is None:
        yield f"the model is in {path}; it has not been validated"
        return
    averaged = progress.averaged_score
    name = f"the best model (step {trainer.loop.best_step:,})" if averaged is None else "the averaged model"
    value = best[0] if averaged is None else averaged
    by_score = trainer.config.metric_for_best == "score"
    score = f"{trainer.task.metric} {value:.2f}" if by_score else f"loss {format_number(-value, 4)}"
    before = "" if progress.first_loss is None else f", {format_number(progress.first_loss, 4)} before training"
    yield f"{name} is in {path}: validation {score}{before}"
