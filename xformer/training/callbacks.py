"""Callbacks for `fit`: printing, validation, early stopping, a time limit.

A callback is called as `callback(event, loop)` with every event and ends training by returning True or a reason; see
`xformer.training.fit.Callback`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from xformer.config import check_count
from xformer.training.events import End, Event, Start, Step, Validation
from xformer.training.fit import TrainingLoop
from xformer.training.interrupt import check_stop
from xformer.training.loss import mean_loss


def print_every(steps: int) -> Callable[[Event, TrainingLoop], None]:
    """Return a callback that prints a line every `steps` steps, and one for each validation."""
    check_count("steps", steps)

    def callback(event: Event, loop: TrainingLoop) -> None:
        if isinstance(event, Step) and event.step % steps == 0:
            speed = f"{event.tokens_per_second:,.0f} tokens/s"
            print(f"step {event.step}  loss {event.loss:.4f}  learning rate {event.learning_rate:.2e}  {speed}")  # noqa: T201
        elif isinstance(event, Validation):
            loss = "" if event.loss is None else f"  loss {event.loss:.4f}"
            score = "" if event.score is None else f"  {event.metric} {event.score:.4f}"
            print(f"validation after step {event.step}{loss}{score}{'  (best so far)' if event.best else ''}")  # noqa: T201

    return callback


def validate(data: Iterable[Any] | Callable[[Any], float], every: int, *, metric: str = "score") -> Validator:
    """Return a callback that evaluates the model every `every` steps and at the end, as a `Validation` event.

    Args:
        data: Validation batches (iterated each time, so no iterator), on which the mean of the training loss per token
            is computed without dropout; or a function (model) -> score, larger being better.
        every: Number of steps between validations.
        metric: Name of the score.
    """
    check_count("every", every)
    return Validator(data, every, metric)


class Validator:
    """The callback that `validate` returns.

    Attributes:
        best: Loss (negated) or score of the best model so far, or None.
    """

    def __init__(self, data: Iterable[Any] | Callable[[Any], float], every: int, metric: str) -> None:
        self.data, self.every, self.metric = data, every, metric
        self.best: float | None = None
        self._step = 0  # of the last validation

    def __call__(self, event: Event, loop: TrainingLoop) -> None:
        """Validate if a validation is due, including one that was interrupted."""
        due = isinstance(event, End) or (isinstance(event, Start | Step) and event.step % self.every == 0)
        if not due or event.step == self._step or (isinstance(event, End) and event.is_interrupted):
            return
        check_stop()
        loss = score = None
        if callable(self.data):
            value = score = float(self.data(loop.model))
        else:
            loss = mean_loss(loop.loss_fn, loop.model, self.data, loop.num_workers, loop.count_tokens)
            value = -loss
        if loss is not None and not math.isfinite(loss):
            raise loop.diverged(f"the validation loss after step {event.step} is {loss}")
        self._step, is_best = event.step, self.best is None or value > self.best
        self.best = value if is_best else self.best
        loop.emit(
            Validation(
                step=event.step,
                epoch=loop.epoch,
                loss=loss,
                perplexity=None if loss is None else math.exp(min(loss, 700.0)),
                score=score,
                metric=None if score is None else self.metric,
                best=is_best,
                minutes=loop.minutes,
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {"best": self.best, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state."""
        self.best, self._step = state["best"], state["step"]


def early_stopping(patience: int) -> EarlyStopping:
    """Return a callback that ends training after `patience` validations without a better model."""
    check_count("patience", patience)
    return EarlyStopping(patience)


class EarlyStopping:
    """The callback that `early_stopping` returns."""

    def __init__(self, patience: int) -> None:
        self.patience, self._stale = patience, 0

    def __call__(self, event: Event, loop: TrainingLoop) -> str | None:
        """Count the validations since the best one."""
        if isinstance(event, Validation):
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


def time_limit(minutes: float) -> Callable[[Event, TrainingLoop], str | None]:
    """Return a callback that ends training after this wall time, earlier sessions of a resumed run included."""

    def callback(event: Event, loop: TrainingLoop) -> str | None:
        return f"{minutes:g} minutes" if loop.minutes >= minutes else None

    return callback
