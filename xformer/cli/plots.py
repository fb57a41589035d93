"""Pictures: learning curves, attention maps and measured speeds, drawn without a screen."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xformer.errors import ConfigError
from xformer.files import atomic_write
from xformer.text.extras import require

_DOTS_PER_INCH = 150


def draw_curves(log: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw training loss, validation loss and score against updates, from the events of a log.

    Raises ConfigError when the log has nothing to draw, CheckpointError when the file cannot be written.
    """
    updates = [event for event in log if event.get("event") == "update"]
    validations = [event for event in log if event.get("event") == "validation"]
    if not updates and not validations:
        raise ConfigError("the log of the run is empty; there is nothing to plot")
    scored = [event for event in validations if event.get("score") is not None]
    figure = _figure(8, 5.5 if scored else 3.2)
    upper, *lower = figure.subplots(2 if scored else 1, 1, sharex=True, squeeze=False)[:, 0]
    upper.plot(*_columns(updates, "loss"), color="tab:gray", linewidth=0.8, label="training, with smoothed labels")
    upper.plot(*_columns(validations, "loss"), color="tab:blue", marker="o", markersize=3, label="validation")
    upper.set_ylabel("loss (nats a token)")
    upper.legend(frameon=False)
    for axes in lower:
        axes.plot(*_columns(scored, "score"), color="tab:green", marker="o", markersize=3)
        axes.set_ylabel(f"validation {scored[0]['metric']}")
    (lower or [upper])[-1].set_xlabel("update")
    for axes in (upper, *lower):
        axes.grid(alpha=0.3)
    _save(figure, path)


def draw_attention(
    weights: Any, source_tokens: Sequence[str], target_tokens: Sequence[str], title: str, path: Path
) -> None:
    """Draw one map of attention: weights (target length, source length), source on x, target on y.

    Raises CheckpointError when the file cannot be written.
    """
    columns, rows = [list(map(_label, tokens)) for tokens in (source_tokens, target_tokens)]
    width, height = 2.2 + 0.55 * len(columns), 1.8 + 0.42 * len(rows)
    figure = _figure(width, height)
    axes = figure.subplots()
    image = axes.imshow(weights, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="left", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_xlabel("source token attended to")
    axes.set_ylabel("target token written")
    axes.set_xticks([x + 0.5 for x in range(len(columns) - 1)], minor=True)
    axes.set_yticks([y + 0.5 for y in range(len(rows) - 1)], minor=True)
    axes.grid(which="minor", color="white", linewidth=1.0)
    axes.tick_params(which="minor", length=0)
    figure.colorbar(image, ax=axes, label="attention")
    figure.suptitle(title)
    _save(figure, path)


def draw_throughput(run: dict[str, Any], path: Path) -> None:
    """Draw the tokens a second of a run of benchmarks (xformer.benchmarks.make_run) against length and batch size.

    A contender has one colour; what else varies makes curves of its own. Raises CheckpointError when the file cannot
    be written.
    """
    panels = [x for x in ("length", "batch") if len({each["sizes"][x] for each in run["results"]}) > 1] or ["length"]
    figure = _figure(5.5 * len(panels), 4.2)
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
    _save(figure, path)


def _varying(run: dict[str, Any], apart_from: str) -> list[str]:
    """The sizes that differ within a run, in the order they are written in."""
    sizes = [result["sizes"] for result in run["results"]]
    return [name for name in sizes[0] if name != apart_from and len({each.get(name) for each in sizes}) > 1]


def _figure(width: float, height: float) -> Any:
    """A figure that belongs to no window, whatever the user's backend is."""
    require("matplotlib")
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    require("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def _label(token: str) -> str:
    """A token as a reader expects it: the mark of a space is dropped, or shown where it is all there is."""
    return token.removeprefix("▁") or "␣"


def _columns(events: Sequence[dict[str, Any]], name: str) -> tuple[list[Any], list[Any]]:
    return [event["step"] for event in events], [event[name] for event in events]


def _save(figure: Any, path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=_DOTS_PER_INCH)
    path = Path(os.path.realpath(path))  # a link stays a link
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot draw into {path}: it is not a regular file; give the name of a picture")
    with atomic_write(path) as file:
        file.write(picture.getvalue())
