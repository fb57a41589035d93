"""Plots of benchmark runs for `xformer bench` and bench/report.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xformer.cli._plots import save
from xformer.text.extras import new_figure


def draw_throughput(run: dict[str, Any], path: Path) -> None:
    """Plot tokens per second against length and batch size, one color per implementation.

    Args:
        run: As returned by `xformer.benchmarks.make_run`.
        path: The PNG file to write.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    results = run["results"]
    panels = [x for x in ("length", "batch") if len({result["sizes"][x] for result in results}) > 1] or ["length"]
    figure = new_figure(5.5 * len(panels), 4.2)
    for axes, x in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for result in results:
            sizes = ", ".join(f"{name} {result['sizes'][name]}" for name in _varying_sizes(run, x))
            for each in result["implementations"]:
                curves.setdefault((each["name"], sizes), []).append((result["sizes"][x], each["tokens_per_second"]))
        names, all_sizes = (list(dict.fromkeys(curve[part] for curve in curves)) for part in (0, 1))
        for (name, sizes), points in curves.items():
            color, linestyle = f"C{names.index(name) % 10}", ("-", "--", ":", "-.")[all_sizes.index(sizes) % 4]
            label = f"{name}, {sizes}" if sizes else name
            x_values, y_values = zip(*sorted(points), strict=True)
            axes.plot(x_values, y_values, marker="o", markersize=3, label=label, color=color, linestyle=linestyle)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks := sorted({result["sizes"][x] for result in results}), list(map(str, ticks)))
        axes.set_xlabel({"length": "length (tokens)", "batch": "batch size (sentences)"}[x])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="x-small")
    figure.axes[0].set_ylabel("tokens per second")
    machine = run["machine"]
    figure.suptitle(f"{run['suite']}, {machine['threads']} threads, {machine['processor']}", fontsize="small")
    save(figure, path)


def draw_ratios(run: dict[str, Any], path: Path) -> None:
    """Plot the time of each implementation divided by that of the first one, with quartiles.

    Args:
        run: As returned by `xformer.benchmarks.make_run`.
        path: The PNG file to write.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    results = run["results"][::-1]  # the first workload at the top
    names = list(dict.fromkeys(each["name"] for result in run["results"] for each in result["implementations"][1:]))
    figure = new_figure(8.5, 1.3 + 0.32 * len(results) + 0.05 * len(names))
    axes = figure.subplots()
    for index, name in enumerate(names):
        offset = 0.3 * (index / max(1, len(names) - 1) - 0.5)  # separates the implementations of a workload
        points = [
            (row - offset, each)
            for row, result in enumerate(results)
            for each in result["implementations"]
            if each["name"] == name
        ]
        ratios = [each["ratio"] for _, each in points]
        errors = [[abs(each["ratio"] - each["ratio_quartiles"][side]) for _, each in points] for side in (0, 1)]
        rows = [row for row, _ in points]
        axes.errorbar(ratios, rows, xerr=errors, fmt="o", markersize=4, elinewidth=0.8, color=f"C{index}", label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(results)), [result["workload"] for result in results], fontsize="small")
    reference = run["results"][0]["implementations"][0]["name"]
    axes.set_xlabel(f"time / time of {reference} (above 1: {reference} is faster)", fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    save(figure, path)


def _varying_sizes(run: dict[str, Any], x: str) -> list[str]:
    """Return the names of the sizes, other than x, that vary within a run."""
    sizes = [result["sizes"] for result in run["results"]]
    return [name for name in sizes[0] if name != x and len({each.get(name) for each in sizes}) > 1]
