"""Learning rate schedules: functions of the step, counted from 1.

`fit` passes the number of its steps to a schedule that has an argument `total_steps`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable

from xformer.config import check_count, check_number
from xformer.errors import ConfigError, check_arguments

Schedule = Callable[..., float]


@check_arguments()
def inverse_square_root(peak: float, *, warmup_steps: int) -> Schedule:
    """Rise linearly to the peak, then fall with the square root of the step (Vaswani et al., 2017, equation 3).

    The paper's peak is d_model^-0.5 * warmup_steps^-0.5.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
    """
    check_number("peak", peak)
    check_count("warmup_steps", warmup_steps)
    factor = peak * math.sqrt(warmup_steps)
    return lambda step: factor * min(math.pow(max(1, step), -0.5), step * math.pow(warmup_steps, -1.5))


@check_arguments()
def constant(peak: float, *, warmup_steps: int = 0) -> Schedule:
    """Rise linearly to the peak, then stay constant.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
    """
    check_number("peak", peak)
    check_count("warmup_steps", warmup_steps, at_least=0)
    return lambda step: peak if step >= warmup_steps else peak * step / warmup_steps


@check_arguments()
def linear(peak: float, *, warmup_steps: int = 0, total_steps: int | None = None, floor: float = 0.0) -> Schedule:
    """Rise linearly to the peak, then fall linearly to the floor.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
        total_steps: Number of steps until the floor. Default: those of the run. The rise then ends at half of them at
            the latest, below the peak.
        floor: Learning rate from then on.
    """
    return _falling(lambda progress: 1.0 - progress, peak, warmup_steps, total_steps, floor)


@check_arguments()
def cosine(peak: float, *, warmup_steps: int = 0, total_steps: int | None = None, floor: float = 0.0) -> Schedule:
    """Rise linearly to the peak, then fall to the floor along half a cosine (Loshchilov and Hutter, 2017).

    Arguments are those of `linear`.
    """
    return _falling(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)), peak, warmup_steps, total_steps, floor)


def as_schedule(learning_rate: Schedule) -> Schedule:
    """Return a function of the step and of `total_steps`: the argument itself if it is one."""
    with contextlib.suppress(ValueError):  # no signature
        if "total_steps" in inspect.signature(learning_rate).parameters:
            return learning_rate
    return lambda step, total_steps: learning_rate(step)


def rate_of(schedule: Schedule, step: int, total_steps: float) -> float:
    """Return the learning rate of a step of so many; raise ConfigError unless it is a finite number."""
    received = schedule(step, total_steps=total_steps)
    try:
        learning_rate = float(received)
    except (TypeError, ValueError):  # e.g. a schedule that returns None
        learning_rate = math.nan
    if not math.isfinite(learning_rate):
        raise ConfigError(f"learning_rate is {received!r} at step {step}; expected a finite number")
    return learning_rate


def _falling(
    shape: Callable[[float], float], peak: float, warmup_steps: int, total_steps: int | None, floor: float
) -> Schedule:
    """Fall from peak to floor along `shape`, which maps the progress of the fall, 0 to 1, to 1 to 0."""
    check_number("peak", peak)
    check_number("floor", floor)
    check_count("warmup_steps", warmup_steps, at_least=0)

    def rate(step: int, total: float, rise: float) -> float:
        if step <= rise and rise:
            return peak * step / warmup_steps
        top = peak if rise == warmup_steps else peak * rise / warmup_steps
        return floor + (top - floor) * shape(min(1.0, (step - rise) / max(1, total - rise)))

    if total_steps is None:
        return lambda step, total_steps: rate(step, total_steps, min(warmup_steps, total_steps / 2))
    check_count("total_steps", total_steps)
    return lambda step: rate(step, total_steps, warmup_steps)
