"""The time of sums over ranks: measured, described by two numbers, and predicted for other numbers of ranks.

    mpiexec -n 8 python bench/all_reduce.py --parameters 60e6 --step-seconds 0.5

An all-reduce of n bytes over p ranks exchanges 2 (p - 1) messages in turn, and 2 (p - 1) / p n bytes per rank, so it
takes T = 2 (p - 1) alpha + 2 (p - 1) / p n beta (Thakur et al., 2005): alpha is the time of a message, 1 / beta the
bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from xformer.benchmarks.machine import describe_machine
from xformer.distributed import Communicator, abort_on_error, connect
from xformer.errors import ConfigError, XformerError
from xformer.io import write_json

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


def format_time(seconds: float) -> str:
    """Format a time with its unit.

    >>> format_time(0.00042)
    '420 us'
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def main() -> None:
    """Measure, and print the measurements and a prediction for more ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=6e7, help="parameters of the model")
    parser.add_argument("--step-seconds", type=float, default=1.0, help="seconds of a training step of one rank")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="write the measurements as JSON")
    arguments = parser.parse_args()
    ranks = connect("mpi")
    with abort_on_error(ranks):
        if ranks.size == 1:
            raise ConfigError("there is 1 rank; expected at least 2: mpiexec -n 2 python bench/all_reduce.py")
        measured = list(measure(ranks))
    if ranks.rank > 0:
        return
    network = fit_network(measured, ranks.size)
    predicted = predict(network, arguments.parameters, arguments.step_seconds)
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "ranks": ranks.size,
        "measured": [{"bytes": size, "seconds": seconds} for size, seconds in measured],
        "alpha": network.alpha,
        "beta": network.beta,
        "parameters": arguments.parameters,
        "step_seconds": arguments.step_seconds,
        "predicted": predicted,
    }
    if arguments.out is not None:
        write_json(arguments.out, results)
    print(f"all-reduce over {ranks.size} ranks, float32, medians")
    print(f"{'bytes':>12}  {'measured':>10}  {'formula':>10}")
    for size, seconds in measured:
        print(f"{size:>12,}  {format_time(seconds):>10}  {format_time(network.seconds(size, ranks.size)):>10}")
    bandwidth = f"{1e-9 / network.beta:.2f} GB/s" if network.beta else "not measurable"
    print(f"alpha {format_time(network.alpha)}, bandwidth {bandwidth}\n")
    step = format_time(arguments.step_seconds)
    print(f"predicted for {arguments.parameters / 1e6:,.3g} million parameters and steps of {step}:")
    print(f"{'':>6}  {'float32':^22}  {'bfloat16':^22}")
    print(f"{'ranks':>6}" + 2 * f"  {'all-reduce':>10}  {'efficiency':>10}")
    for row in predicted:
        cells = (
            f"  {format_time(row[name]['seconds']):>10}  {row[name]['efficiency']:>10.0%}"
            for name in ("float32", "bfloat16")
        )
        print(f"{row['ranks']:>6}" + "".join(cells))


if __name__ == "__main__":
    try:
        main()
    except XformerError as error:
        sys.exit(f"error: {error}")
