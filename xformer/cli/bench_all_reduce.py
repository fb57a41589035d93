"""`xformer bench allreduce`: the sum of gradients over the ranks that mpiexec has started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xformer.benchmarks import all_reduce, describe_machine
from xformer.cli._console import make_console
from xformer.distributed import abort_on_error, connect
from xformer.errors import ConfigError
from xformer.io import write_json


def bench_all_reduce(num_parameters: float, step_seconds: float, out: Path | None, *, as_json: bool) -> None:
    """Measure, and print the measurements and a prediction for more ranks.

    Args:
        num_parameters: Number of parameters of the model of the prediction.
        step_seconds: Seconds of its step on one rank.
        out: File for the results.
        as_json: Print JSON instead of tables.

    Raises:
        ConfigError: If there is only one rank.
    """
    ranks = connect("mpi")
    with abort_on_error(ranks):
        if ranks.size == 1:
            raise ConfigError("there is 1 rank; expected at least 2: mpiexec -n 2 xformer bench allreduce")
        measured = list(all_reduce.measure(ranks))
    if ranks.rank > 0:
        return
    network = all_reduce.fit_network(measured, ranks.size)
    predicted = all_reduce.predict(network, num_parameters, step_seconds)
    results: dict[str, Any] = {
        "machine": describe_machine(),
        "ranks": ranks.size,
        "measured": [{"bytes": size, "seconds": seconds} for size, seconds in measured],
        "alpha": network.alpha,
        "beta": network.beta,
        "parameters": num_parameters,
        "step_seconds": step_seconds,
        "predicted": predicted,
    }
    if out is not None:
        write_json(out, results)
    if as_json:
        print(json.dumps(results))
        return
    console = make_console()
    console.print(f"all-reduce over {ranks.size} ranks, float32, medians")
    console.print(f"{'bytes':>12}  {'measured':>10}  {'formula':>10}")
    for size, seconds in measured:
        console.print(f"{size:>12,}  {_time(seconds):>10}  {_time(network.seconds(size, ranks.size)):>10}")
    bandwidth = f"{1e-9 / network.beta:.2f} GB/s" if network.beta else "not measurable"
    console.print(f"alpha {_time(network.alpha)}, bandwidth {bandwidth}\n")
    console.print(f"predicted for {num_parameters / 1e6:,.3g} million parameters and steps of {_time(step_seconds)}:")
    console.print(f"{'':>6}  {'float32':^22}  {'bfloat16':^22}")
    console.print(f"{'ranks':>6}" + 2 * f"  {'all-reduce':>10}  {'efficiency':>10}")
    for row in predicted:
        cells = (
            f"  {_time(row[name]['seconds']):>10}  {row[name]['efficiency']:>10.0%}" for name in ("float32", "bfloat16")
        )
        console.print(f"{row['ranks']:>6}" + "".join(cells))


def _time(seconds: float) -> str:
    """Format a time with its unit.

    >>> _time(0.00042)
    '420 us'
    """
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1.0:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
