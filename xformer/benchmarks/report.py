"""A run of a benchmark as data, and as a table for people."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

_COLUMNS = ("time", "quartiles", "tokens/s", "GFLOP/s", "of GEMM", "memory", "ratio", "quartiles")


def make_run(
    work: str,
    machine: dict[str, Any],
    gemm_flops_per_second: float | None,
    results: Sequence[dict[str, Any]] = (),
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Put the results of races together with what they belong to, ready for JSON. notes: what is no race."""
    return {
        "work": work,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine,
        "gemm_flops_per_second": gemm_flops_per_second,
        "results": list(results),
        "notes": list(notes),
    }


def machine_line(run: dict[str, Any]) -> str:
    """What the figures of a run belong to."""
    found = run["machine"]
    parts = [
        *([found["gpu"]] if found.get("gpu") else []),
        found["processor"],
        f"{found['threads']} of {found['cores']} cores",
        found["blas"],
        f"Python {found['python']}",
        *(f"{name} {version}" for name, version in found["versions"].items()),
    ]
    if run["gemm_flops_per_second"]:
        parts.append(f"GEMM {run['gemm_flops_per_second'] / 1e9:.0f} GFLOP/s")
    if found["load"] is not None:
        parts.append(f"load {found['load']}")
    return ", ".join(parts)


def label(figures: dict[str, Any]) -> str:
    """The name of a contender, and how much of its answer is that of the first, where they may differ."""
    agreement = figures["agreement"]
    name: str = figures["name"]
    return name if agreement is None else f"{name} ({agreement:.0%} alike)"


def cells(figures: dict[str, Any], gemm_flops_per_second: float | None) -> list[str]:
    """The figures of a contender in words, one for each of the columns."""
    low, high = (in_units(value).split()[0] for value in figures["seconds_quartiles"])
    flops, peak = figures["flops_per_second"], figures["peak_bytes"]
    share = flops / gemm_flops_per_second if flops and gemm_flops_per_second else None
    return [
        in_units(figures["seconds"]),
        f"{low}-{high}",
        f"{figures['tokens_per_second']:,.0f}" if figures["tokens_per_second"] else "",
        f"{flops / 1e9:.1f}" if flops else "",
        f"{share:.0%}" if share else "",
        "" if peak is None else f"{peak / 2**20:,.1f} MiB",
        f"{figures['ratio']:.2f}",
        "-".join(f"{ratio:.2f}" for ratio in figures["ratio_quartiles"]),
    ]


def in_units(seconds: float) -> str:
    """A time in milliseconds, with three digits that count."""
    milliseconds = 1e3 * seconds
    digits = 3 if milliseconds < 1 else 2 if milliseconds < 10 else 1 if milliseconds < 100 else 0
    return f"{milliseconds:.{digits}f} ms"


def table(run: dict[str, Any]) -> list[str]:
    """The lines of a table: each case, and below it each contender; then the notes."""
    rows = [
        (label(figures), cells(figures, run["gemm_flops_per_second"]))
        for result in run["results"]
        for figures in result["contenders"]
    ]
    width = max([len("xformer"), *(len(name) for name, _ in rows)])
    widths = [max(len(column), *(len(row[place]) for _, row in rows)) for place, column in enumerate(_COLUMNS)]
    lines = [" " * (width + 4) + "  ".join(map(str.rjust, _COLUMNS, widths))]
    remaining = iter(rows)
    for result in run["results"]:
        lines.append(f"{result['case']} ({result['turns']} turns)")
        for _, (name, row) in zip(result["contenders"], remaining, strict=False):
            lines.append(f"  {name:<{width}}  " + "  ".join(map(str.rjust, row, widths)))
        lines += [f"  {reason}" for reason in result["absent"].values()]
    return [*lines, *run["notes"]]
