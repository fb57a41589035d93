"""Plots of runs and benchmarks, drawn without a display."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xformer.benchmarks.report import format_seconds, growth
from xformer.errors import ConfigError
from xformer.io import check_no_overwrite, write_bytes
from xformer.runs.console import plural
from xformer.text.extras import new_figure

_DOTS_PER_INCH = 150
_BAR, _PANEL = 0.34, 5.2  # height of a bar and width of a panel, in inches


def draw_curves(log: Sequence[dict[str, Any]], path: Path, *, label_smoothing: float = 0.0) -> None:
    """Plot training loss, validation loss and validation score against steps.

    Args:
        log: Events of a run's log.
        path: PNG file to write.
        label_smoothing: Label smoothing of the training loss.

    Raises:
        ConfigError: If the log contains no steps and no validations.
        CheckpointError: If the file cannot be written.
    """
    steps = [event for event in log if event.get("event") == "step"]
    validations = [event for event in log if event.get("event") == "validation"]
    if not steps and not validations:
        raise ConfigError("the log of the run is empty: nothing to plot")
    scored = [event for event in validations if event.get("score") is not None]
    figure = new_figure(8, 5.5 if scored else 3.2)
    upper, *lower = figure.subplots(2 if scored else 1, 1, sharex=True, squeeze=False)[:, 0]
    label = "training (with label smoothing)" if label_smoothing else "training"
    upper.plot(*_columns(steps, "loss"), color="tab:gray", linewidth=0.8, label=label)
    upper.plot(*_columns(validations, "loss"), color="tab:blue", marker="o", markersize=3, label="validation")
    upper.set_ylabel("loss (nats per token)")
    upper.legend(frameon=False)
    for axes in lower:
        axes.plot(*_columns(scored, "score"), color="tab:green", marker="o", markersize=3)
        axes.set_ylabel(f"validation {scored[0]['metric']}")
    (lower or [upper])[-1].set_xlabel("step")
    for axes in (upper, *lower):
        axes.grid(alpha=0.3)
    save(figure, path)


def check_plot(path: Path, protected: Iterable[Path]) -> None:
    """Raise ConfigError if `--plot` is not the name of a PNG file, or would replace one of the protected files."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot is {path}; expected a name ending in .png")
    check_no_overwrite(path, protected, "--plot")


def _columns(events: Sequence[dict[str, Any]], name: str) -> tuple[list[Any], list[Any]]:
    return [event["step"] for event in events], [event[name] for event in events]


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, atomically; raises CheckpointError if that fails."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    write_bytes(path, buffer.getvalue())


def draw_bars(run: dict[str, Any], path: Path) -> None:
    """Plot a bar for each library, in one panel for each workload: its time with quartiles, or its peak of memory.

    Args:
        run: As returned by `xformer.benchmarks.report.make_run`.
        path: The PNG file to write.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    results, machine = run["results"], run["machine"]
    columns = min(len(results), 3)
    rows = math.ceil(len(results) / columns)
    most = max(len(result["implementations"]) for result in results)
    figure = new_figure(max(7.5, _PANEL * columns), rows * (_BAR * most + 0.8) + 0.6)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes in panels:
        axes.set_axis_off()
    for axes, result in zip(panels, results, strict=False):
        axes.set_axis_on()
        _draw_panel(axes, result, machine["versions"], memory=run["suite"] == "memory", is_alone=_is_alone(results))
    threads = plural(machine["threads"], "thread")
    figure.suptitle(f"{_title(results)}: {threads} of {machine['processor']}", fontsize="medium")
    save(figure, path)


def draw_growth(run: dict[str, Any], axis: str, path: Path) -> None:
    """Plot times against the sizes of one axis, both on logarithmic scales, with the power by which they grow.

    Args:
        run: As returned by `xformer.benchmarks.report.make_run`.
        axis: Name of the setting that varies, such as "length".
        path: The PNG file to write.
    """
    figure = new_figure(7.5, 5.0)
    axes = figure.subplots()
    for name, (sizes, seconds, power) in growth(run["results"], axis).items():
        label = f"{name.removeprefix('xformer ')}: {axis}^{power:.2f}"
        axes.loglog(sizes, [1e3 * each for each in seconds], marker="o", label=label)
    ticks = sorted({result["sizes"][axis] for result in run["results"]})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(axis.replace("_", " "))
    axes.set_ylabel("milliseconds")
    axes.legend()
    axes.set_title(f"{run['suite']}: {plural(run['machine']['threads'], 'thread')} of {run['machine']['processor']}")
    save(figure, path)


def _draw_panel(axes: Any, result: dict[str, Any], versions: dict[str, str], *, memory: bool, is_alone: bool) -> None:
    libraries = [each["name"].removeprefix("xformer ") for each in result["implementations"]]
    names = [f"{library} {versions.get(library.split('.')[0], '')}".rstrip() for library in libraries]
    draw = _memory if memory else _time
    values, lows, highs, texts = zip(*map(draw, result["implementations"]), strict=True)
    axes.barh(names, values, height=0.7, color=[f"C{index % 10}" for index in range(len(names))])
    axes.hlines(names, lows, highs, color="0.2", linewidth=1.5)
    for name, high, text in zip(names, highs, texts, strict=True):
        axes.annotate(text, (high, name), (5, 0), textcoords="offset points", va="center", fontsize="small")
    axes.set_xlim(0, 2.1 * max(highs) or 1.0)  # room for the texts
    axes.invert_yaxis()  # the first library at the top
    sizes = "batch {batch}, length {length}, {heads} heads of {head_dim} features".format(**result["sizes"])
    axes.set_title(sizes if is_alone else result["workload"], loc="left", fontsize="small")
    unit = "peak memory (MiB)" if memory else f"milliseconds   (× time of {libraries[0]}, quartiles)"
    axes.set_xlabel(unit, fontsize="small")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize="small")
    axes.spines[["top", "right"]].set_visible(False)


def _time(measurements: dict[str, Any]) -> tuple[float, float, float, str]:
    """Return the median, the quartiles and the text of a bar."""
    median = measurements["seconds"]
    low, high = measurements["seconds_quartiles"]
    ratios = "–".join(f"{ratio:.2f}" for ratio in measurements["ratio_quartiles"])
    return 1e3 * median, 1e3 * low, 1e3 * high, f"{format_seconds(median)}   {measurements['ratio']:.2f} × ({ratios})"


def _memory(measurements: dict[str, Any]) -> tuple[float, float, float, str]:
    peak = measurements["peak_bytes"]
    if peak is None:
        return 0.0, 0.0, 0.0, "unknown"
    return peak / 2**20, peak / 2**20, peak / 2**20, f"{peak / 2**20:,.1f} MiB"


def _is_alone(results: list[dict[str, Any]]) -> bool:
    """Return whether all workloads of a run are of attention, or of one layer."""
    return {result["sizes"].get("part", "attention") for result in results} in ({"attention"}, {"layer"})


def _title(results: list[dict[str, Any]]) -> str:
    """Return the function that all workloads of a run compute."""
    sizes = results[0]["sizes"]
    if not _is_alone(results):
        return f"Parts of a Transformer, {sizes['dtype']}"
    parts = ["Multi-head attention" if sizes.get("part") == "layer" or sizes.get("layer") else "Attention"]
    parts += [name for name in ("causal", "padded") if sizes.get(name)]
    parts.append("forward and backward" if sizes.get("backward") else "forward")
    return f"{', '.join(parts)}, {sizes['dtype']}"
