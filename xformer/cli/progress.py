"""How training is shown: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from xformer.cli.console import short
from xformer.runs.config import LoopSettings
from xformer.training.events import Average, Update, Validation

_SECONDS_BETWEEN_LINES = 10.0
_SMOOTHING = 0.9  # of the figures shown, so that they can be read


class TrainingProgress:
    """Shows the updates and validations of a Trainer: `with TrainingProgress(...) as shown: Trainer(report=shown)`.

    unit: what speed is counted in.
    """

    def __init__(
        self, console: Console, settings: LoopSettings, first_step: int = 0, *, unit: str = "target tokens"
    ) -> None:
        self.console, self.settings, self.unit = console, settings, unit
        self._first_step, self._began = first_step, time.monotonic()
        self._loss = self._speed = 0.0
        self._figures = 0  # how many updates the smoothed ones have seen
        self._last_line = self._began
        self._validation = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if self.console.is_terminal:
            # Four times a second: what draws the bar takes turns with the arithmetic.
            columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4, transient=True)
            endless = self.settings.max_updates is None and self.settings.max_minutes is None
            self._task = self._bar.add_task("first update ...", total=None if endless else 1.0)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def __call__(self, event: Update | Validation) -> None:
        """Show one event. Whoever watched may be gone, a closed terminal or pipe; the training goes on."""
        with contextlib.suppress(OSError):
            self._show(event)

    def _show(self, event: Update | Validation) -> None:
        if isinstance(event, Validation):
            self._validation = _short(event)
            self.console.print(_validation_line(event))
        else:
            self._show_update(event)

    def _show_update(self, update: Update) -> None:
        self._figures += 1
        keep = min(_SMOOTHING, 1.0 - 1.0 / self._figures)
        self._loss = keep * self._loss + (1.0 - keep) * update.loss
        self._speed = keep * self._speed + (1.0 - keep) * update.tokens_per_second
        share, seconds_left = self._remaining(update)
        text = f"update {update.step:,}  loss {short(self._loss, 3)}  {self._speed:,.0f} {self.unit}/s"
        if seconds_left is not None:
            text += f"  {_duration(seconds_left)} left"
        if self._bar is not None:
            text += f"  {self._validation}" if self._validation else ""
            self._bar.update(self._task, description=text, completed=share)
        elif time.monotonic() - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self.console.print(text)

    def _remaining(self, update: Update) -> tuple[float, float | None]:
        """The share of the run that is done, and the seconds left: what ends first counts."""
        updates, minutes = self.settings.max_updates, self.settings.max_minutes
        share, left = 0.0, None
        if updates is not None:
            seconds_each = (time.monotonic() - self._began) / max(1, update.step - self._first_step)
            share, left = update.step / updates, seconds_each * (updates - update.step)
        if minutes is not None:
            share = max(share, update.minutes / minutes)
            by_clock = max(0.0, 60.0 * (minutes - update.minutes))
            left = by_clock if left is None else min(left, by_clock)
        return min(share, 1.0), left


def _short(validation: Validation) -> str:
    score = "" if validation.score is None else f", {validation.metric} {validation.score:.2f}"
    return f"valid: perplexity {short(validation.perplexity)}{score}"


def _validation_line(validation: Validation) -> str:
    score = "" if validation.score is None else f"  {validation.metric} {validation.score:.2f}"
    best = "  (best so far)" if validation.best else ""
    averaged = f"mean of {len(validation.updates)} models: " if isinstance(validation, Average) else ""
    return (
        f"{averaged}validation after update {validation.step:,}  epoch {validation.epoch + 1}  "
        f"{_duration(60.0 * validation.minutes)}  loss {short(validation.loss, 4)}  "
        f"perplexity {short(validation.perplexity)}{score}{best}"
    )


def _duration(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
