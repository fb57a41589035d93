"""Results of a benchmark run as data and as a table."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import numpy as np

_COLUMNS = ("time", "quartiles", "tokens/s", "GFLOP/s", "of GEMM", "memory", "ratio", "quartiles")


def make_run(suite: str, machine: dict[str, Any], gemm_flops_per_second: float | None) -> dict[str, Any]:
    """Return a run on a machine, with the date, as JSON data.

    Args:
        suite: Name of the suite.
        machine: As returned by `describe_machine`.
        gemm_flops_per_second: As returned by the function of this name.

    Returns:
        The run, without results, which `InterleavedBenchmark.result` returns, and without notes for the report.
    """
    return {
        "suite": suite,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "gemm_flops_per_second": gemm_flops_per_second,
        "results": [],
        "notes": [],
    }


def machine_line(run: dict[str, Any]) -> str:
    """Return the machine of a run in one line."""
    machine = run["machine"]
    parts = [
        *([machine["gpu"]] if machine.get("gpu") else []),
        machine["processor"],
        f"{machine['threads']} of {machine['cores']} cores",
        machine["blas"],
        *([f"native library {machine['native']}"] if "native" in machine else []),  # older files lack it
        f"Python {machine['python']}",
        *(f"{name} {version}" for name, version in machine["versions"].items()),
    ]
    if run["gemm_flops_per_second"]:
        parts.append(f"GEMM {run['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s")
    if machine["load"] is not None:
        parts.append(f"load {machine['load']}")
    return ", ".join(parts)


def format_label(measurements: dict[str, Any]) -> str:
    """Return the name of an implementation, and by how much its results differ from those of the first one."""
    name: str = measurements["name"]
    return f"{name} (differs by {measurements['difference']:.1%})" if measurements["differs"] else name


def format_cells(measurements: dict[str, Any], gemm_flops_per_second: float | None) -> list[str]:
    """Return the measurements of an implementation as text, one string per column."""
    low, high = (format_seconds(value).split()[0] for value in measurements["seconds_quartiles"])
    flops, peak = measurements["flops_per_second"], measurements["peak_bytes"]
    share = flops / gemm_flops_per_second if flops and gemm_flops_per_second else None
    return [
        format_seconds(measurements["seconds"]),
        f"{low}-{high}",
        f"{measurements['tokens_per_second']:,.0f}" if measurements["tokens_per_second"] else "",
        f"{flops / 1e9:.1f}" if flops else "",
        f"{share:.0%}" if share else "",
        "" if peak is None else f"{peak / 2**20:,.1f} MiB",
        f"{measurements['ratio']:.2f}",
        "-".join(f"{ratio:.2f}" for ratio in measurements["ratio_quartiles"]),
    ]


def format_seconds(seconds: float) -> str:
    """Format a duration in milliseconds with three significant digits."""
    milliseconds = 1e3 * seconds
    digits = 3 if milliseconds < 1 else 2 if milliseconds < 10 else 1 if milliseconds < 100 else 0
    return f"{milliseconds:.{digits}f} ms"


def growth(results: Sequence[dict[str, Any]], axis: str) -> dict[str, tuple[list[int], list[float], float]]:
    """Return the sizes, the times, and n if the time grows as the n-th power of the size, for each implementation.

    n is the slope of a line through the logarithms.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    names = {result["sizes"].get("part") for result in results}
    for result in results:
        part = f"{result['sizes'].get('part')}, " if len(names) > 1 else ""
        for each in result["implementations"]:
            points.setdefault(part + each["name"], []).append((result["sizes"][axis], each["seconds"]))
    grown = {}
    for name, pairs in points.items():
        sizes, seconds = [size for size, _ in sorted(pairs)], [time for _, time in sorted(pairs)]
        if len(pairs) > 1:
            grown[name] = sizes, seconds, float(np.polyfit(np.log(sizes), np.log(seconds), 1)[0])
    return grown


def format_growth(results: Sequence[dict[str, Any]], axis: str) -> list[str]:
    """Return a line for each implementation: how its time grows with an axis."""
    return [f"{name}: time grows as {axis}^{power:.2f}" for name, (_, _, power) in growth(results, axis).items()]


def format_markdown(run: dict[str, Any]) -> list[str]:
    """Return a table in Markdown: a row for each workload, a column for each implementation, then the notes."""
    names = list(dict.fromkeys(each["name"] for result in run["results"] for each in result["implementations"]))
    heads = [name.removeprefix("xformer ") for name in names]
    lines = ["", f"| | {' | '.join(heads)} |", "|---" * (len(names) + 1) + "|"]
    for result in run["results"]:
        measured = {each["name"]: each for each in result["implementations"]}
        cells = [_cell(measured[name]) if name in measured else "-" for name in names]
        lines.append(f"| {result['workload']} | {' | '.join(cells)} |")
    failed = dict.fromkeys(reason for result in run["results"] for reason in result["unavailable"].values())
    return [*lines, "", *(f"- {note}" for note in (*failed, *run["notes"]))]


def _cell(each: dict[str, Any]) -> str:
    return f"{format_seconds(each['seconds'])} ({each['ratio']:.2f}){', differs' if each['differs'] else ''}"


def format_table(run: dict[str, Any]) -> list[str]:
    """Return the lines of a table: each workload followed by its implementations, then the notes."""
    rows = [
        (format_label(measurements), format_cells(measurements, run["gemm_flops_per_second"]))
        for result in run["results"]
        for measurements in result["implementations"]
    ]
    width = max([len("xformer"), *(len(name) for name, _ in rows)])
    widths = [max(len(column), *(len(row[index]) for _, row in rows)) for index, column in enumerate(_COLUMNS)]
    lines = [" " * (width + 4) + "  ".join(map(str.rjust, _COLUMNS, widths))]
    remaining = iter(rows)
    for result in run["results"]:
        lines.append(f"{result['workload']} ({result['rounds']} rounds)")
        for _, (name, row) in zip(result["implementations"], remaining, strict=False):
            lines.append(f"  {name:<{width}}  " + "  ".join(map(str.rjust, row, widths)))
        lines += [f"  {reason}" for reason in result["unavailable"].values()]
    return [*lines, *run["notes"]]
