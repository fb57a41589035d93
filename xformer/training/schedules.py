"""Learning rates by update number: plain functions of the step, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Callable

from xformer.errors import ConfigError

Schedule = Callable[[int], float]


def inverse_square_root(factor: float, d_model: int, warmup_steps: int) -> Schedule:
    """factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (Vaswani et al., 2017, equation 3)."""

    def learning_rate(step: int) -> float:
        return factor * math.pow(d_model, -0.5) * min(math.pow(step, -0.5), step * math.pow(warmup_steps, -1.5))

    return learning_rate


def cosine(factor: float, d_model: int, warmup_steps: int, total_steps: int) -> Schedule:
    """Rise as the inverse square root schedule does, then fall to zero along half a cosine (Loshchilov and Hutter,
    2017): better than staying high when the number of updates is known."""
    peak = factor * math.pow(d_model, -0.5) * math.pow(warmup_steps, -0.5)

    def learning_rate(step: int) -> float:
        if step <= warmup_steps:
            return peak * step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return peak * 0.5 * (1.0 + math.cos(math.pi * progress))

    return learning_rate


def schedule(name: str, *, factor: float, d_model: int, warmup_steps: int, total_steps: int | None) -> Schedule:
    """Return the schedule of that name; raises ConfigError for an unknown one or a cosine without an end."""
    if name == "inverse_square_root":
        return inverse_square_root(factor, d_model, warmup_steps)
    if name == "cosine":
        if total_steps is None:
            raise ConfigError("schedule 'cosine' needs max_updates, the number of updates at which it reaches zero")
        return cosine(factor, d_model, warmup_steps, total_steps)
    raise ConfigError(f"schedule is {name!r}; expected 'inverse_square_root' or 'cosine'")
