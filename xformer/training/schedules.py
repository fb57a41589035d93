"""Learning rate schedules: functions of the step, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from xformer.config import check_count
from xformer.errors import ConfigError, check_arguments

Schedule = Callable[[int], float]


@check_arguments()
def inverse_square_root(peak: float, *, warmup_steps: int) -> Schedule:
    """Rise linearly to the peak, then fall with the square root of the step (Vaswani et al., 2017, equation 3).

    The paper's peak is d_model^-0.5 * warmup_steps^-0.5.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
    """
    _check_rates(peak=peak)
    check_count("warmup_steps", warmup_steps)
    factor = peak * math.sqrt(warmup_steps)

    def learning_rate(step: int) -> float:
        return factor * min(math.pow(max(1, step), -0.5), step * math.pow(warmup_steps, -1.5))

    return learning_rate


@check_arguments()
def constant(peak: float, *, warmup_steps: int = 0) -> Schedule:
    """Rise linearly to the peak, then stay constant.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
    """
    _check_rates(peak=peak)
    check_count("warmup_steps", warmup_steps, at_least=0)

    def learning_rate(step: int) -> float:
        return peak if step >= warmup_steps else peak * step / warmup_steps

    return learning_rate


@check_arguments()
def linear(peak: float, *, warmup_steps: int = 0, total_steps: int, floor: float = 0.0) -> Schedule:
    """Rise linearly to the peak, then fall linearly to the floor.

    Args:
        peak: Largest learning rate.
        warmup_steps: Number of steps until the peak.
        total_steps: Number of steps until the floor.
        floor: Learning rate from then on.
    """
    return _falling(lambda progress: 1.0 - progress, peak, warmup_steps, total_steps, floor)


@check_arguments()
def cosine(peak: float, *, warmup_steps: int = 0, total_steps: int, floor: float = 0.0) -> Schedule:
    """Rise linearly to the peak, then fall to the floor along half a cosine (Loshchilov and Hutter, 2017).

    Arguments are those of `linear`.
    """
    return _falling(lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)), peak, warmup_steps, total_steps, floor)


def _falling(
    shape: Callable[[float], float], peak: float, warmup_steps: int, total_steps: int, floor: float
) -> Schedule:
    """Fall from peak to floor along `shape`, which maps the progress of the fall, 0 to 1, to 1 to 0."""
    _check_rates(peak=peak, floor=floor)
    check_count("warmup_steps", warmup_steps, at_least=0)
    check_count("total_steps", total_steps)

    def learning_rate(step: int) -> float:
        if step <= warmup_steps and warmup_steps:
            return peak * step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return floor + (peak - floor) * shape(progress)

    return learning_rate


def _check_rates(**rates: Any) -> None:
    for name, rate in rates.items():
        if not isinstance(rate, Real) or not math.isfinite(rate):
            raise ConfigError(f"{name} is {rate!r}; expected a finite number")
