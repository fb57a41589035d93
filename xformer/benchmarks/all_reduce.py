"""The time of sums over ranks: measured, described by two numbers, and predicted for other numbers of ranks.

An all-reduce of n bytes over p ranks exchanges 2 (p - 1) messages in turn, and 2 (p - 1) / p n bytes per rank, so it
takes T = 2 (p - 1) alpha + 2 (p - 1) / p n beta (Thakur et al., 2005): alpha is the time of a message, 1 / beta the
bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from xformer.distributed import Communicator

SIZES = tuple(4**exponent for exponent in range(5, 14))  # bytes, 1 KiB to 64 MiB
PREDICTED_RANKS = (2, 4, 8, 16, 32, 64, 128, 1000)
_MIN_SECONDS = 0.2  # of the rounds of one size


class Network(NamedTuple):
    """A model of the time that messages take.

    Attributes:
        alpha: Seconds of a message.
        beta: Seconds of a byte.
    """

    alpha: float
    beta: float

    def seconds(self, num_bytes: float, num_ranks: int) -> float:
        """Return the predicted time of an all-reduce."""
        return 2 * (num_ranks - 1) * (self.alpha + num_bytes / num_ranks * self.beta)


def measure(communicator: Communicator, sizes: Sequence[int] = SIZES, rounds: int = 7) -> Iterator[tuple[int, float]]:
    """Yield (bytes, median seconds) of all-reduces of float32 arrays, as the slowest rank sees them.

    Args:
        communicator: The ranks; all of them call this function.
        sizes: Numbers of bytes.
        rounds: Minimum number of measurements of each size.
    """
    for size in sizes:
        arrays = [np.ones(size // 4, np.float32)]
        communicator.all_reduce(arrays)
        times: list[float] = []
        while True:
            communicator.all_gather(None)  # start together
            started = time.perf_counter()
            communicator.all_reduce(arrays)
            times.append(max(communicator.all_gather(time.perf_counter() - started)))
            if len(times) >= rounds and sum(times) >= _MIN_SECONDS:
                break
        yield size, statistics.median(times)


def fit_network(measured: Sequence[tuple[int, float]], num_ranks: int) -> Network:
    """Return the alpha and beta, at least 0, with the smallest relative errors."""
    sizes, times = (np.asarray(column, dtype=np.float64) for column in zip(*measured, strict=True))
    steps = 2.0 * (num_ranks - 1)
    columns: Any = np.stack([np.full_like(sizes, steps), steps / num_ranks * sizes], axis=1) / times[:, None]
    alpha, beta = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)[0]
    if alpha < 0.0:
        alpha, beta = 0.0, columns[:, 1].sum() / (columns[:, 1] ** 2).sum()
    elif beta < 0.0:
        alpha, beta = columns[:, 0].sum() / (columns[:, 0] ** 2).sum(), 0.0
    return Network(float(alpha), float(beta))


def predict(network: Network, num_parameters: float, step_seconds: float) -> list[dict[str, Any]]:
    """Return, for growing numbers of ranks, the time of the sum of all gradients and the efficiency of training.

    Efficiency is the time of a step without communication, divided by the time with it.

    Args:
        network: Measured alpha and beta.
        num_parameters: Number of parameters of the model.
        step_seconds: Time of a step of one rank without communication.
    """
    rows = []
    for num_ranks in PREDICTED_RANKS:
        row: dict[str, Any] = {"ranks": num_ranks}
        for name, width in (("float32", 4), ("bfloat16", 2)):
            seconds = network.seconds(width * num_parameters, num_ranks)
            row[name] = {"seconds": seconds, "efficiency": step_seconds / (step_seconds + seconds)}
        rows.append(row)
    return rows
