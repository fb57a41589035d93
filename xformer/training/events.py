"""Events of a training run, which callbacks receive and log.jsonl records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from xformer.html import curve, table, tag


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a training run.

    Attributes:
        step: Number of steps made so far.
    """

    name: ClassVar[str] = ""
    is_logged: ClassVar[bool] = True

    step: int

    def to_dict(self) -> dict[str, Any]:
        """Return the event as a line of log.jsonl."""
        return {"event": self.name, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Start(Event):
    """Training starts, or resumes after `step` steps."""

    is_logged: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Step(Event):
    """A step was made.

    Attributes:
        epoch: Number of completed passes over the data.
        loss: Mean training loss over the tokens, before the update.
        grad_norm: Norm of the gradient before clipping.
        learning_rate: Learning rate of the step.
        num_tokens: Number of tokens of the step.
        tokens_per_second: Speed of this step.
        minutes: Wall time so far, in minutes, including those before it was resumed.
        loss_scale: Scale of the loss (float16 only).
    """

    name: ClassVar[str] = "step"

    epoch: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    tokens_per_second: float
    minutes: float
    loss_scale: float = 1.0


_ROWS = 10  # of the table of a history
_COLUMNS = {
    "step": ("step", ","),
    "loss": ("loss", ".4f"),
    "learning rate": ("learning_rate", ".2e"),
    "gradient norm": ("grad_norm", ".3g"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "minutes": ("minutes", ".2f"),
}


class History(list[Step]):
    """The `Step` events of a call of `fit`, and its `validations`: a list that notebooks show as curves and a table."""

    def __init__(self, steps: Iterable[Step] = ()) -> None:
        super().__init__(steps)
        self.validations: list[Validation] = []

    def __repr__(self) -> str:
        if not self:
            return "History of 0 steps"
        first, last = self[0], self[-1]
        return f"History of steps {first.step} to {last.step}: loss {first.loss:.4g} to {last.loss:.4g}"

    def _repr_html_(self) -> str:
        """Return curves of the loss and of the validations, and a table of at most ten steps, as HTML."""
        if not self:
            return tag("p", repr(self))
        indices = sorted({round(row * (len(self) - 1) / max(1, _ROWS - 1)) for row in range(_ROWS)})
        rows = [[format(getattr(self[i], name), spec) for name, spec in _COLUMNS.values()] for i in indices]
        losses = curve([step.step for step in self], [step.loss for step in self], "loss")
        found = [(each.step, each.loss or each.score or 0.0) for each in self.validations]
        return losses + curve([x for x, _ in found], [y for _, y in found], "valid.") + table([*_COLUMNS], rows)


@dataclass(frozen=True, slots=True)
class Skip(Event):
    """A step in float16 overflowed, and its update was skipped; the loss scale is halved.

    Attributes:
        loss_scale: The scale that was too large.
    """

    name: ClassVar[str] = "skip"

    loss_scale: float


@dataclass(frozen=True, slots=True)
class Validation(Event):
    """The model was evaluated.

    Attributes:
        epoch: Number of completed passes over the training data.
        loss: Mean loss over the tokens of the validation set; None if only a score was computed.
        perplexity: Exponential of the loss.
        score: A score such as BLEU, larger being better; None if only the loss was computed.
        metric: Name of the score.
        best: Whether this model is the best so far.
        minutes: Wall time so far, in minutes, including those before it was resumed.
    """

    name: ClassVar[str] = "validation"

    epoch: int
    loss: float | None
    perplexity: float | None
    score: float | None
    metric: str | None
    best: bool
    minutes: float


def format_limit(minutes: float, units: tuple[str, str] = ("minutes", "seconds")) -> str:
    """Return a time limit as text, below a minute in seconds."""
    return f"{round(minutes, 1):g} {units[0]}" if minutes >= 1.0 else f"{60.0 * minutes:.2g} {units[1]}"


@dataclass(frozen=True, slots=True)
class Plan(Event):
    """A time limit has fixed the number of steps.

    Attributes:
        steps: The number, which repeats the run without a time limit.
        max_steps: Number of steps without the limit; None if there is no other one.
        minutes: The limit.
    """

    name: ClassVar[str] = "plan"

    steps: int
    max_steps: int | None
    minutes: float


@dataclass(frozen=True, slots=True)
class Checkpoint(Event):
    """The training state was saved.

    Attributes:
        path: The file.
    """

    is_logged: ClassVar[bool] = False

    path: str


@dataclass(frozen=True, slots=True)
class End(Event):
    """Training ended.

    Attributes:
        reason: Reason, e.g. "1000 steps".
        is_interrupted: Whether a signal such as Ctrl-C ended it.
    """

    is_logged: ClassVar[bool] = False

    reason: str
    is_interrupted: bool = False
