"""Plots: learning curves and attention maps, drawn without a display."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xformer.errors import ConfigError
from xformer.io import atomic_write, check_no_overwrite
from xformer.text.extras import require

_DOTS_PER_INCH = 150


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


def draw_attention(
    weights: Any, source_tokens: Sequence[str], target_tokens: Sequence[str], title: str, path: Path
) -> None:
    """Plot attention weights as a heat map, with the source on the x axis.

    Args:
        weights: Attention weights of shape (target length, source length).
        source_tokens: Labels of the columns.
        target_tokens: Labels of the rows.
        title: Title of the plot.
        path: PNG file to write.

    Raises:
        CheckpointError: If the file cannot be written.
    """
    columns, rows = [list(map(_label, tokens)) for tokens in (source_tokens, target_tokens)]
    width, height = 2.2 + 0.55 * len(columns), 1.8 + 0.42 * len(rows)
    figure = new_figure(width, height)
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
    save(figure, path)


def new_figure(width: float, height: float) -> Any:
    """Return a figure that needs no display, whichever backend of matplotlib is configured."""
    require("matplotlib")
    figure = require("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")
    require("matplotlib.backends.backend_agg").FigureCanvasAgg(figure)
    return figure


def check_plot(path: Path, protected: Iterable[Path]) -> None:
    """Raise ConfigError if `--plot` is not the name of a PNG file, or would replace one of the protected files."""
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot is {path}; expected a name ending in .png")
    check_no_overwrite(path, protected, "--plot")


def _label(token: str) -> str:
    """Format a token: drop the mark of a leading space, or show it if the token is nothing else."""
    return token.removeprefix("▁") or "␣"


def _columns(events: Sequence[dict[str, Any]], name: str) -> tuple[list[Any], list[Any]]:
    return [event["step"] for event in events], [event[name] for event in events]


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, atomically; raises CheckpointError if that fails."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS_PER_INCH)
    path = Path(os.path.realpath(path))  # a symbolic link stays a link
    if path.exists() and not path.is_file():
        raise ConfigError(f"cannot write {path}: it is not a regular file")
    with atomic_write(path) as file:
        file.write(buffer.getvalue())
