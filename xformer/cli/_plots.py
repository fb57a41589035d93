"""Plots: learning curves, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from xformer.errors import ConfigError
from xformer.io import atomic_write, check_no_overwrite
from xformer.text.extras import new_figure

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
    with atomic_write(path) as file:
        file.write(buffer.getvalue())
