"""Callbacks for `fit`: printing, validation, early stopping, a time limit.

A callback is called as `callback(event, loop)` with every event and ends training by returning True or a reason; see
`xformer.training.fit.Callback`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar

from xformer.config import check_count, check_number
from xformer.errors import ConfigError, check_arguments, describe_type
from xformer.training.events import End, Event, Plan, Skip, Start, Step, Validation, format_limit
from xformer.training.fit import TrainingLoop
from xformer.training.inputs import check_batches
from xformer.training.interrupt import check_stop
from xformer.training.loss import mean_loss
from xformer.training.schedules import rate_of

_LOG = logging.getLogger("xformer")
_MANY = 10**9  # steps, more than any run or warm-up has


def print_every(steps: int, *, unit: str = "tokens") -> Callable[[Event, TrainingLoop], None]:
    """Return a callback that prints a line every `steps` steps, and one for each validation (on rank 0).

    Args:
        steps: Number of steps between lines.
        unit: Name of the things that `num_tokens` of `fit` counts, e.g. "samples".
    """
    check_count("steps", steps)

    def callback(event: Event, loop: TrainingLoop) -> None:
        if loop.communicator.rank > 0:
            return
        if isinstance(event, Step) and event.step % steps == 0:
            speed = f"{event.tokens_per_second:,.0f} {unit}/s"
            print(f"step {event.step}  loss {event.loss:.4f}  learning rate {event.learning_rate:.2e}  {speed}")  # noqa: T201
        elif isinstance(event, Plan):
            print(f"{event.steps:,} steps fit into {format_limit(event.minutes)}; steps={event.steps} repeats the run")  # noqa: T201
        elif isinstance(event, Validation):
            loss = "" if event.loss is None else f"  loss {event.loss:.4f}"
            score = "" if event.score is None else f"  {event.metric} {event.score:.4f}"
            print(f"validation after step {event.step}{loss}{score}{'  (best so far)' if event.best else ''}")  # noqa: T201

    return callback


def validate(data: Iterable[Any] | Callable[[Any], float], every: int, *, metric: str = "score") -> Validator:
    """Return a callback that evaluates the model every `every` steps and at the end, as a `Validation` event.

    Args:
        data: Validation batches (a re-iterable, not an iterator), on which the mean of the training loss per token
            is computed without dropout; or a function (model) -> score, larger being better.
        every: Number of steps between validations.
        metric: Name of the score.
    """
    check_count("every", every)
    check_batches("data", data, "the model")
    if isinstance(data, Iterator):
        raise ConfigError(f"data is {describe_type(data)}, which ends with the first validation; expected a list")
    if callable(data):
        return Validator(every, score=data, metric=metric)

    def loss(model: Any, loop: TrainingLoop) -> float:
        return mean_loss(loop.loss_fn, model, data, loop.num_workers, loop.count_tokens, loop.communicator)

    return Validator(every, loss=loss)


@dataclass(eq=False)
class Validator:
    """The callback that `validate` returns.

    Args:
        every: Number of steps between validations.
        loss: (model, loop) -> validation loss.
        score: (model) -> score, larger being better.
        metric: Name of the score.
        by_loss: Compare models by the loss, not the score. The loss also decides between equal scores.
        trial: Does the work of `score` for a trained model, whatever the model; default `score`.
        at_start: Validate before the first step, too.

    Attributes:
        step: Step of the last validation.
        durations: Minutes of each validation of this process.
        best: The values by which the best model so far was compared, larger being better; None before there is one.
    """

    validates: ClassVar = True

    every: int
    _: KW_ONLY
    loss: Callable[[Any, TrainingLoop], float] | None = None
    score: Callable[[Any], float] | None = None
    metric: str | None = None
    by_loss: bool = False
    trial: Callable[[Any], float] | None = None
    at_start: bool = False
    step: int = field(default=0, init=False)
    durations: list[float] = field(default_factory=list, init=False)
    best: list[float] | None = field(default=None, init=False)

    def __call__(self, event: Event, loop: TrainingLoop) -> None:
        """Validate if a validation is due, including one that was interrupted."""
        if isinstance(event, Start) and not event.step:
            self.step, self.best, self.durations = -1 if self.at_start else 0, None, []
        due = isinstance(event, End) or (isinstance(event, Start | Step) and event.step % self.every == 0)
        if not due or event.step == self.step or (isinstance(event, End) and event.is_interrupted):
            return
        check_stop()
        started = loop.minutes
        validation = self.evaluate(loop.model, loop)
        self.step, self.best = event.step, self.rank(validation) if validation.best else self.best
        loop.emit(validation)
        self.durations.append(loop.minutes - started)

    def cost(self, loop: TrainingLoop) -> float:
        """Return the minutes of a validation; without one so far, do its work once."""
        if not self.durations:
            started = loop.minutes
            replace(self, score=self.score and (self.trial or self.score)).evaluate(loop.model, loop)
            self.durations.append(loop.minutes - started)
        return sum(self.durations) / len(self.durations)

    def evaluate(self, model: Any, loop: TrainingLoop, event: Callable[..., Validation] = Validation) -> Validation:
        """Evaluate a model and return the event.

        Raises:
            TrainingError: If the loss is not finite.
        """
        loss = None if self.loss is None else self.loss(model, loop)
        if loss is not None and not math.isfinite(loss):
            raise loop.diverged(f"the validation loss after step {loop.step} is {loss}")
        if self.score is not None:
            loop.save()  # save first: scoring is slow
        score = None if self.score is None else float(self.score(model))
        loss, score = loop.communicator.all_gather([loss, score])[0]  # ranks must not differ in what they decide
        perplexity = None if loss is None else math.exp(min(loss, 700.0))
        metric = None if self.score is None else self.metric
        validation = event(loop.step, loop.epoch, loss, perplexity, score, metric, best=False, minutes=loop.minutes)
        return replace(validation, best=self.best is None or self.rank(validation) > self.best)

    def rank(self, validation: Validation) -> list[float]:
        """Return the values by which a model is compared: its score, if any, and then its negated loss."""
        values = [] if validation.score is None or self.by_loss else [validation.score]
        return values if validation.loss is None else [*values, -validation.loss]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"step": self.step, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.step, self.best = state["step"], state["best"]


@check_arguments(monitor="the best model is that of validate", restore_best_weights="pass keep_best=True to fit")
def early_stopping(patience: int) -> EarlyStopping:
    """Return a callback that ends training after `patience` validations without a better model.

    The callback `validate` makes the validations. With `keep_best=True`, `fit` returns the best model.
    """
    check_count("patience", patience)
    return EarlyStopping(patience)


class EarlyStopping:
    """The callback that `early_stopping` returns."""

    stops_early = True

    def __init__(self, patience: int) -> None:
        self.patience, self._stale = patience, 0

    def __call__(self, event: Event, loop: TrainingLoop) -> str | None:
        """Count the validations since the best one."""
        if isinstance(event, Start) and not event.step:
            self._stale = 0
        if type(event) is Validation:  # not the average of checkpoints
            self._stale = 0 if event.best else self._stale + 1
        if self._stale < self.patience:
            return None
        return f"no better model in {self.patience} validation{'s' if self.patience > 1 else ''}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"stale": self._stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self._stale = state["stale"]


def time_limit(minutes: float) -> TimeLimit:
    """Return a callback that ends training in time; the time before a run was resumed counts, too.

    After 25 steps, a tenth of the time, or the warm-up, it fixes the number of steps that fit, validations and saves
    included, at most `steps` of `fit`; this is a `Plan` event. A schedule without `total_steps` ends there, and must
    not fall before. A run of this number of steps, without a limit, has the same bits.

    Args:
        minutes: Wall time in minutes.

    Raises:
        ConfigError: Unless it is a number above 0.
    """
    check_number("minutes", minutes, above=0)
    return TimeLimit(float(minutes))


class TimeLimit:
    """The callback that `time_limit` returns; `steps` is the number of steps, once it is fixed."""

    fixes_steps = True

    def __init__(self, minutes: float) -> None:
        self.minutes = minutes
        self.steps: int | None = None
        self._limits: list[Any] = []  # for which the number was fixed
        self._first: tuple[int, float] | None = None  # the step measured from, and the minutes of training then

    def __call__(self, event: Event, loop: TrainingLoop) -> str | None:
        """Fix the number of steps when it is time to; end training when the time is over."""
        if isinstance(event, Start):
            self._start(loop)
        elif isinstance(event, Step | Skip) and self.steps is None:
            self._measure(event.step, loop)
        if not self._limits:  # a validation before the first step, and before its Start
            return None
        reason = f"the time limit ({format_limit(self._limits[0], ('min', 's'))})"
        if loop.step >= loop.max_steps:
            return None if loop.max_steps == self._limits[1] else reason
        if loop.minutes < self.minutes:
            return None
        if self.steps and isinstance(event, Step | Skip) and loop.communicator.rank == 0:
            hint = "the machine has become slower; resume with more minutes to finish the schedule"
            _LOG.warning("step %d is made in time, not step %d as planned; %s", loop.step, self.steps, hint)
        return reason

    def _start(self, loop: TrainingLoop) -> None:
        """Use the number that was fixed before; raise ConfigError if it is too late to fix one."""
        self._first = None
        if not loop.step:  # a new run
            self.steps, self._limits = None, []
        before, self._limits = self._limits, [self.minutes, _finite(loop.max_steps)]
        falls = _follows_steps(loop, loop.step + 1)
        was_cut = self.steps and loop.step < self.steps and loop.minutes >= before[0]
        if before != self._limits and not (falls and was_cut):
            if falls and (before or not loop.step or self._limits[1] is None):
                expected = f"max_minutes and max_steps {before}" if before else "a warm-up"
                problem = f"too early to plan {format_limit(self.minutes)}; expected {expected}"
                raise ConfigError(f"the learning rate falls after step {loop.step}, {problem}")
            self.steps = self._limits[1] if falls else None  # falls: a run that got its limit later
        loop.max_steps = self.steps or loop.max_steps

    def _measure(self, step: int, loop: TrainingLoop) -> None:
        """Fix the number of steps after enough of them; the first one may include tracing and compilation."""
        validators = [each for each in loop.callbacks if isinstance(each, Validator)]
        trained = loop.minutes - sum(sum(each.durations) for each in validators)
        self._first = first, trained_first = self._first or (step, trained)
        count, taken = step - first, trained - trained_first
        is_due = count >= 24 or taken > 0.1 * self.minutes or _follows_steps(loop, step + 1)
        if not loop.communicator.all_gather(is_due)[0]:
            return
        started, most = loop.minutes, loop.max_steps
        loop.save()
        saving, every = loop.minutes - started, loop.config.save_every_minutes
        costs = [each.cost(loop) + saving for each in validators]
        cost = taken / count if count else trained / step
        cost += sum(each / validator.every for each, validator in zip(costs, validators, strict=True))
        cost *= 1.0 + (saving / every if every else 0.0)
        left = 0.97 * self.minutes - loop.minutes - 2.0 * sum(costs)  # the last validation, and that of an average
        warm = step * _follows_steps(loop, _MANY)  # at most half of the steps
        fitting = max(step + int(max(0.0, left) / max(cost, 1e-9)), 2 * warm)
        loop.max_steps = self.steps = loop.communicator.all_gather(min(fitting, _finite(most) or fitting))[0]
        loop.emit(Plan(step, self.steps, _finite(most), self.minutes))
        loop.save()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"steps": self.steps, "limits": self._limits if self.steps else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.steps, self._limits = state["steps"], state["limits"]


def _finite(steps: float) -> int | None:
    return None if steps == math.inf else int(steps)


def _follows_steps(loop: TrainingLoop, step: int) -> bool:
    """Return whether the learning rate of a step depends on the number of steps."""
    return rate_of(loop.learning_rate, step, 2 * step) != rate_of(loop.learning_rate, step, _MANY)
