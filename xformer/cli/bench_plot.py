"""Plots of benchmark runs for `xformer bench`."""

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


def _varying_sizes(run: dict[str, Any], x: str) -> list[str]:
    """Return the names of the sizes, other than x, that vary within a run."""
    sizes = [result["sizes"] for result in run["results"]]
    return [name for name in sizes[0] if name != x and len({each.get(name) for each in sizes}) > 1]
