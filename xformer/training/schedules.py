"""Learning rates by update number: plain functions of the step, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Callable

from xformer.errors import ConfigError

Schedule = Callable[[int], float]
SCHEDULES = ("inverse_square_root", "cosine", "linear", "constant")


def inverse_square_root(factor: float, d_model: int, warmup_steps: int) -> Schedule:
    """factor * d_model^-0.5 * min(step^-0.5, step * warmup_steps^-1.5) (Vaswani et al., 2017, equation 3)."""

    def learning_rate(step: int) -> float:
        return factor * math.pow(d_model, -0.5) * min(math.pow(step, -0.5), step * math.pow(warmup_steps, -1.5))

    return learning_rate


def constant(peak: float, warmup_steps: int) -> Schedule:
    """Rise to the peak in a straight line, and stay there."""

    def learning_rate(step: int) -> float:
        return peak if step >= warmup_steps else peak * step / warmup_steps

    return learning_rate


def linear(peak: float, warmup_steps: int, total_steps: int, floor: float = 0.0) -> Schedule:
    """Rise to the peak in a straight line, and fall to the floor in another one."""
    return _falling(lambda progress: 1.0 - progress, peak, warmup_steps, total_steps, floor)


def cosine(peak: float, warmup_steps: int, total_steps: int, floor: float = 0.0) -> Schedule:
    """Rise to the peak in a straight line, then fall to the floor along half a cosine (Loshchilov and Hutter, 2017):
    better than staying high when the number of updates is known."""
    return _falling(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)), peak, warmup_steps, total_steps, floor)


def _falling(
    shape: Callable[[float], float], peak: float, warmup_steps: int, total_steps: int, floor: float
) -> Schedule:
    """shape: what is left of the way from peak to floor, from 1 to 0, by the share of the fall that is over."""

    def learning_rate(step: int) -> float:
        if step <= warmup_steps:
            return peak * step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return floor + (peak - floor) * shape(progress)

    return learning_rate


def schedule(
    name: str,
    *,
    warmup_steps: int,
    total_steps: int | None,
    factor: float = 1.0,
    d_model: int = 1,
    learning_rate: float | None = None,
    min_learning_rate: float = 0.0,
) -> Schedule:
    """Return the schedule of that name.

    learning_rate: the peak, at the end of the warm-up; None: factor * d_model^-0.5 * warmup_steps^-0.5, the paper's.
    min_learning_rate: where cosine and linear end, after total_steps.

    Raises ConfigError for an unknown name, a cosine or linear schedule without an end, and a minimum above the peak
    or of a schedule that has none.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}; expected one of {', '.join(map(repr, SCHEDULES))}")
    falls_to_an_end = name in ("cosine", "linear")
    if falls_to_an_end and total_steps is None:
        raise ConfigError(f"schedule {name!r} needs max_updates, the number of updates at which it ends")
    if min_learning_rate and not falls_to_an_end:
        raise ConfigError(f"min_learning_rate is {min_learning_rate}; schedule {name!r} has none; leave it out")
    paper_s_peak = factor * math.pow(d_model, -0.5) * math.pow(warmup_steps, -0.5)
    peak = paper_s_peak if learning_rate is None else learning_rate
    if min_learning_rate > peak:
        raise ConfigError(
            f"min_learning_rate is {min_learning_rate}, above the peak of {peak:.3g}; lower it, or raise the peak"
        )
    if total_steps is not None and falls_to_an_end:
        return (cosine if name == "cosine" else linear)(peak, warmup_steps, total_steps, min_learning_rate)
    if name == "constant":
        return constant(peak, warmup_steps)
    if learning_rate is not None:
        factor, d_model = learning_rate * math.sqrt(warmup_steps), 1
    return inverse_square_root(factor, d_model, warmup_steps)
