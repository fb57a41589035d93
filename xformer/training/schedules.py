"""Learning rate schedules: functions of the step, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Callable

from xformer.errors import ConfigError

Schedule = Callable[[int], float]
SCHEDULES = ("inverse_square_root", "cosine", "linear", "constant")


def inverse_square_root(peak: float, *, warmup_steps: int) -> Schedule:
    """Rise linearly to the peak, then fall with the square root of the step (Vaswani et al., 2017, equation 3).

    The paper's peak is d_model^-0.5 * warmup_steps^-0.5.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
    """
    factor = peak * math.sqrt(warmup_steps)

    def learning_rate(step: int) -> float:
        return factor * min(math.pow(step, -0.5), step * math.pow(warmup_steps, -1.5))

    return learning_rate


def constant(peak: float, *, warmup_steps: int = 0) -> Schedule:
    """Rise linearly to the peak, then stay constant.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
    """

    def learning_rate(step: int) -> float:
        return peak if step >= warmup_steps else peak * step / warmup_steps

    return learning_rate


def linear(peak: float, *, warmup_steps: int = 0, total_steps: int, floor: float = 0.0) -> Schedule:
    """Rise linearly to the peak, then fall linearly to the floor.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
        total_steps: Number of steps until the floor.
        floor: Learning rate from then on.
    """
    return _falling(lambda progress: 1.0 - progress, peak, warmup_steps, total_steps, floor)


def cosine(peak: float, *, warmup_steps: int = 0, total_steps: int, floor: float = 0.0) -> Schedule:
    """Rise linearly to the peak, then fall to the floor along half a cosine (Loshchilov and Hutter, 2017).

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
        total_steps: Number of steps until the floor.
        floor: Learning rate from then on.
    """
    return _falling(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)), peak, warmup_steps, total_steps, floor)


def _falling(
    shape: Callable[[float], float], peak: float, warmup_steps: int, total_steps: int, floor: float
) -> Schedule:
    """Fall from peak to floor along `shape`, which maps the progress of the fall, 0 to 1, to 1 to 0."""

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
    d_model: int | None = None,
    learning_rate: float | None = None,
    min_learning_rate: float = 0.0,
) -> Schedule:
    """Return the schedule of a configuration.

    Args:
        name: One of `SCHEDULES`.
        warmup_steps: Number of steps until the peak.
        total_steps: Number of steps until the end of cosine and linear.
        factor: Without learning_rate the peak is factor * d_model^-0.5 * warmup_steps^-0.5.
        d_model: Size of the model; needed only without learning_rate.
        learning_rate: The peak.
        min_learning_rate: Learning rate at the end of cosine and linear.

    Raises:
        ConfigError: For an unknown name, a cosine or linear schedule without total_steps, a minimum that is above the
            peak or does not apply to the schedule, and a peak that cannot be computed.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"schedule is {name!r}; expected one of {', '.join(map(repr, SCHEDULES))}")
    falls_to_an_end = name in ("cosine", "linear")
    if falls_to_an_end and total_steps is None:
        raise ConfigError(f"schedule {name!r} needs max_updates, the number of updates at which it ends")
    if min_learning_rate and not falls_to_an_end:
        raise ConfigError(f"min_learning_rate is {min_learning_rate}; schedule {name!r} has none; leave it out")
    if learning_rate is None:
        if d_model is None:
            raise ConfigError("learning_rate is None; the model has no d_model to compute it from; set learning_rate")
        learning_rate = factor * math.pow(d_model, -0.5) * math.pow(warmup_steps, -0.5)
    if min_learning_rate > learning_rate:
        raise ConfigError(
            f"min_learning_rate is {min_learning_rate}, above the peak of {learning_rate:.3g}; lower it, or raise the "
            "peak"
        )
    if total_steps is not None and falls_to_an_end:
        make = cosine if name == "cosine" else linear
        return make(learning_rate, warmup_steps=warmup_steps, total_steps=total_steps, floor=min_learning_rate)
    return (constant if name == "constant" else inverse_square_root)(learning_rate, warmup_steps=warmup_steps)
