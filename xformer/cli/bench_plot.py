"""The pictures of measured speeds that `xformer bench` and bench/report.py draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from xformer.cli._plots import new_figure, save


def draw_throughput(run: dict[str, Any], path: Path) -> None:
    """Draw the tokens a second of a run of benchmarks (xformer.benchmarks.make_run) against length and batch size.

    A contender has one color; what else varies makes curves of its own. Raises CheckpointError when the file cannot
    be written.
    """
    panels = [x for x in ("length", "batch") if len({each["sizes"][x] for each in run["results"]}) > 1] or ["length"]
    figure = new_figure(5.5 * len(panels), 4.2)
    for axes, x in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        curves: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for result in run["results"]:
            others = ", ".join(f"{name} {result['sizes'][name]}" for name in _varying(run, x))
            for each in result["contenders"]:
                curves.setdefault((each["name"], others), []).append((result["sizes"][x], each["tokens_per_second"]))
        names, kinds = (list(dict.fromkeys(curve[part] for curve in curves)) for part in (0, 1))
        for (name, others), points in curves.items():
            look = {"color": f"C{names.index(name) % 10}", "linestyle": ("-", "--", ":", "-.")[kinds.index(others) % 4]}
            label = f"{name}, {others}" if others else name
            axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=label, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks := sorted({result["sizes"][x] for result in run["results"]}), list(map(str, ticks)))
        axes.set_xlabel({"length": "length (tokens)", "batch": "batch (sentences)"}[x])
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize="x-small")
    figure.axes[0].set_ylabel("tokens a second")
    machine = run["machine"]
    figure.suptitle(f"{run['work']}, {machine['threads']} threads, {machine['processor']}", fontsize="small")
    save(figure, path)


def draw_ratios(run: dict[str, Any], path: Path) -> None:
    """Draw, for every case of a run, the time of each contender divided by the first one's, with its quartiles.

    Raises CheckpointError when the file cannot be written.
    """
    results = run["results"][::-1]  # the first case at the top
    names = list(dict.fromkeys(each["name"] for result in run["results"] for each in result["contenders"][1:]))
    figure = new_figure(8.5, 1.3 + 0.32 * len(results) + 0.05 * len(names))
    axes = figure.subplots()
    for number, name in enumerate(names):
        height = 0.3 * (number / max(1, len(names) - 1) - 0.5)  # contenders of a case lie a little apart
        found = [(place, each) for place, result in enumerate(results) for each in result["contenders"]]
        points = [(place - height, each) for place, each in found if each["name"] == name]
        ratios = [each["ratio"] for _, each in points]
        away = [[abs(each["ratio"] - each["ratio_quartiles"][side]) for _, each in points] for side in (0, 1)]
        rows = [place for place, _ in points]
        axes.errorbar(ratios, rows, xerr=away, fmt="o", markersize=4, elinewidth=0.8, color=f"C{number}", label=name)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(range(len(results)), [result["case"] for result in results], fontsize="small")
    first = run["results"][0]["contenders"][0]["name"]
    axes.set_xlabel(f"time / that of {first} (above 1: {first} is faster)", fontsize="small")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize="small", loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=3)
    save(figure, path)


def _varying(run: dict[str, Any], apart_from: str) -> list[str]:
    """The sizes that differ within a run, in the order they are written in."""
    sizes = [result["sizes"] for result in run["results"]]
    return [name for name in sizes[0] if name != apart_from and len({each.get(name) for each in sizes}) > 1]
