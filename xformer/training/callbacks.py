"""Callbacks for `fit`: printing, validation, early stopping, a time limit.

A callback is called as `callback(event, loop)` with every event and ends training by returning True or a reason; see
`xformer.training.fit.Callback`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from numbers import Real
from typing import Any

from xformer.config import check_count
from xformer.errors import ConfigError, describe_type
from xformer.training.events import End, Event, Start, Step, Validation
from xformer.training.fit import TrainingLoop
from xformer.training.inputs import check_batches
from xformer.training.interrupt import check_stop
from xformer.training.loss import mean_loss

_LOG = logging.getLogger("xformer")


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


class Validator:
    """The callback that `validate` returns.

    Args:
        every: Number of steps between validations.
        loss: (model, loop) -> validation loss.
        score: (model) -> score, larger being better.
        metric: Name of the score.
        by_loss: Compare models by the loss, not the score. The loss also decides between equal scores.

    Attributes:
        step: Step of the last validation.
        best: The values by which the best model so far was compared, larger being better; None before there is one.
    """

    def __init__(
        self,
        every: int,
        *,
        loss: Callable[[Any, TrainingLoop], float] | None = None,
        score: Callable[[Any], float] | None = None,
        metric: str | None = None,
        by_loss: bool = False,
    ) -> None:
        self.every, self.metric, self._loss, self._score, self._by_loss = every, metric, loss, score, by_loss
        self.step = 0
        self.best: list[float] | None = None

    def __call__(self, event: Event, loop: TrainingLoop) -> None:
        """Validate if a validation is due, including one that was interrupted."""
        due = isinstance(event, End) or (isinstance(event, Start | Step) and event.step % self.every == 0)
        if not due or event.step == self.step or (isinstance(event, End) and event.is_interrupted):
            return
        check_stop()
        validation = self.evaluate(loop.model, loop)
        self.step, self.best = event.step, self.rank(validation) if validation.best else self.best
        loop.emit(validation)

    def evaluate(self, model: Any, loop: TrainingLoop, event: Callable[..., Validation] = Validation) -> Validation:
        """Evaluate a model and return the event.

        Raises:
            TrainingError: If the loss is not finite.
        """
        loss = None if self._loss is None else self._loss(model, loop)
        if loss is not None and not math.isfinite(loss):
            raise loop.diverged(f"the validation loss after step {loop.step} is {loss}")
        if self._score is not None:
            loop.save()  # save first: scoring is slow
        score = None if self._score is None else float(self._score(model))
        loss, score = loop.communicator.all_gather([loss, score])[0]  # ranks must not differ in what they decide
        validation = event(
            step=loop.step,
            epoch=loop.epoch,
            loss=loss,
            perplexity=None if loss is None else math.exp(min(loss, 700.0)),
            score=score,
            metric=None if self._score is None else self.metric,
            best=False,
            minutes=loop.minutes,
        )
        return replace(validation, best=self.best is None or self.rank(validation) > self.best)

    def rank(self, validation: Validation) -> list[float]:
        """Return the values by which a model is compared: its score, if any, and then its negated loss."""
        values = [] if validation.score is None or self._by_loss else [validation.score]
        return values if validation.loss is None else [*values, -validation.loss]

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"step": self.step, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.step, self.best = state["step"], state["best"]


def early_stopping(patience: int) -> EarlyStopping:
    """Return a callback that ends training after `patience` validations without a better model.

    The callback `validate` makes the validations.
    """
    check_count("patience", patience)
    return EarlyStopping(patience)


class EarlyStopping:
    """The callback that `early_stopping` returns."""

    def __init__(self, patience: int) -> None:
        self.patience, self._stale, self._is_validated = patience, 0, False

    def __call__(self, event: Event, loop: TrainingLoop) -> str | None:
        """Count the validations since the best one; raise ConfigError if there will be none."""
        self._is_validated |= type(event) is Validation or any(isinstance(each, Validator) for each in loop.callbacks)
        if isinstance(event, Start) and not self._is_validated and all(map(_is_own, loop.callbacks)):
            raise ConfigError("early_stopping needs validations; expected validate(data, every) in callbacks, too")
        if isinstance(event, End) and not self._is_validated:
            _LOG.warning("early_stopping got no validation; expected validate(data, every) in callbacks, too")
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


def _is_own(callback: Any) -> bool:
    """Return whether xformer defines a callback; any other one may call that of `validate`."""
    return str(getattr(callback, "__module__", None)).startswith("xformer.")


def time_limit(minutes: float) -> Callable[[Event, TrainingLoop], str | None]:
    """Return a callback that ends training after some wall time; the time before a run was resumed counts, too.

    Args:
        minutes: Wall time in minutes, at least 0.

    Raises:
        ConfigError: For anything else.
    """
    if not isinstance(minutes, Real) or isinstance(minutes, bool) or not minutes >= 0:
        raise ConfigError(f"minutes is {minutes!r}; expected a number of at least 0")

    def callback(event: Event, loop: TrainingLoop) -> str | None:
        return f"the time limit ({round(minutes, 3):g} min)" if loop.minutes >= minutes else None

    return callback
