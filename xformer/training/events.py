"""What a trainer tells about itself: how far it is, each update, each validation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from xformer.training.precision import UNSCALED, GradScaler


@dataclass(frozen=True)
class Progress:
    """How far a run is.

    minutes: wall time so far, over all sittings; best_score, best_loss: of the best model; stale_validations: since
    then; checkpoints: the [update, score] of each model that is kept, None being the score of one that was not
    validated; averaged_step: when their mean was last tried; averaged_score: its score, if it became the model;
    loss_scale: of the next update.
    """

    step: int = 0
    epoch: int = 0
    tokens: int = 0
    minutes: float = 0.0
    validated_step: int = 0
    best_step: int = 0
    best_score: float | None = None
    best_loss: float | None = None
    stale_validations: int = 0
    checkpoints: list[list[Any]] = field(default_factory=list)
    averaged_step: int = 0
    averaged_score: float | None = None
    loss_scale: GradScaler = UNSCALED

    def __post_init__(self) -> None:
        if isinstance(self.loss_scale, dict):  # as it was saved
            object.__setattr__(self, "loss_scale", GradScaler(**self.loss_scale))


@dataclass(frozen=True)
class Update:
    """One update, for whoever shows progress. loss: nats a token, with smoothed labels and z-loss; loss_scale: what it
    was multiplied by to be differentiated."""

    step: int
    epoch: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    tokens_per_second: float
    minutes: float
    loss_scale: float = 1.0


@dataclass(frozen=True)
class Validation:
    """One validation.

    loss: nats a token without smoothing; score: how good what the model writes is, by the metric of that name, such as
    "BLEU"; None when it was not measured; best: better than every model before.
    """

    step: int
    epoch: int
    loss: float
    perplexity: float
    score: float | None
    metric: str | None
    best: bool
    minutes: float


@dataclass(frozen=True)
class Average(Validation):
    """The validation of a mean of checkpoints. updates: after which they were made."""

    updates: list[int] = field(default_factory=list)
