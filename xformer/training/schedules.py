"""Learning rate schedules: functions of the step, counted from 1."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


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

    Arguments are those of `linear`.
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
