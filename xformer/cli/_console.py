"""Terminal output: consoles, progress, and the formatting of numbers and of this program's name."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from xformer.pipelines import CorpusProgress
from xformer.runs.config import BaseTrainingConfig
from xformer.runs.trainer import Average
from xformer.training import Event, Start, Step, Validation

_WIDTH_WITHOUT_TERMINAL = 110  # of tables
_SECONDS_BETWEEN_LINES = 10.0
_SMOOTHING = 0.9  # of the loss and the speed shown


class _Console(Console):
    """A console on which a broken pipe is an ordinary error; rich would exit the process."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled."""
        raise


def make_console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return a console on stdout or stderr that prints text as it is, without markup or highlighting, or nothing."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    return _Console(stderr=stderr, quiet=quiet, highlight=False, markup=False, soft_wrap=True, width=width)


def program() -> str:
    """Return the command that runs this program again: "xformer", or a path to it."""
    invoked = Path(sys.argv[0])
    if invoked.name == "__main__.py":
        return f"{Path(sys.executable).name} -m xformer"
    # A nox session puts its environment on the path, but only while it runs.
    is_on_path = "NOX_CURRENT_SESSION" not in os.environ and shutil.which("xformer")
    return "xformer" if is_on_path or invoked.name != "xformer" else os.path.relpath(invoked)


def format_number(value: float | None, decimals: int = 2) -> str:
    """Format a loss or a perplexity, which may be missing, or very large if training diverges.

    >>> format_number(12.345), format_number(7e21)
    ('12.35', '7e+21')
    """
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: "1 line", "2 lines"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


@contextlib.contextmanager
def line_progress(total: int | None, *, visible: bool) -> Iterator[Callable[[int], None]]:
    """Show on stderr how many lines are done, if it is a terminal; yields a function that adds to the count.

    Args:
        total: Number of lines, if known.
        visible: Pass False if the output goes to the same terminal.
    """
    console = make_console(stderr=True)
    if not visible or not console.is_terminal:
        yield lambda count: None
        return
    text = "{task.completed:,} lines done" if total is None else "{task.completed:,} of {task.total:,} lines"
    lines = TextColumn(text)
    columns = (lines, TimeElapsedColumn()) if total is None else (BarColumn(), lines, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda count: progress.advance(task, count)


@contextlib.contextmanager
def corpus_progress() -> Iterator[Callable[[CorpusProgress], None]]:
    """Show the state of a corpus on stderr: in a progress bar on a terminal, otherwise every ten seconds."""
    console = make_console(stderr=True)
    start_time = last_line_time = time.monotonic()
    columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("reading ...", total=None)

        def show(progress: CorpusProgress) -> None:
            nonlocal last_line_time
            text = f"{progress.num_done:,} of {progress.num_lines:,} lines"
            if new := progress.num_done - progress.num_resumed:
                speed = new / (time.monotonic() - start_time)
                text += (
                    f"  {format_speed(speed)}  {format_duration((progress.num_lines - progress.num_done) / speed)} left"
                )
            if progress.num_failed:
                text += f"  {plural(progress.num_failed, 'chunk')} failed"
            bar.update(task, description=text, completed=progress.num_done, total=progress.num_lines)
            if not console.is_terminal and time.monotonic() - last_line_time >= _SECONDS_BETWEEN_LINES:
                last_line_time = time.monotonic()
                console.print(text)

        yield show


def format_speed(lines_per_second: float) -> str:
    """Format a speed: "1,200 lines/s", "0.25 lines/s"."""
    return f"{lines_per_second:,.0f} lines/s" if lines_per_second >= 10 else f"{lines_per_second:.2g} lines/s"


@contextlib.contextmanager
def loading_progress(*, visible: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Show on stderr how much of a model is read, if it is a terminal; yields an argument of `load_pretrained`."""
    console = make_console(stderr=True)
    if not visible or not console.is_terminal:
        yield None
        return
    columns = (TextColumn("loading"), BarColumn(), TextColumn("{task.percentage:.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        yield lambda done, total: progress.update(task, completed=done, total=total)


class TrainingProgress:
    """A callback that shows steps and validations: in a progress bar on a terminal, otherwise every ten seconds.

    Args:
        console: Console to print on.
        config: Configuration of the training, which says when it ends.
        unit: Unit of the speed shown.
    """

    def __init__(self, console: Console, config: BaseTrainingConfig, *, unit: str = "target tokens") -> None:
        self.console, self.config, self.unit = console, config, unit
        self._first_step: int | None = None
        self._start_time = time.monotonic()
        self._loss = self._speed = 0.0
        self._num_smoothed = 0
        self._last_line_time = self._start_time
        self._validation = ""
        self._bar: Progress | None = None
        self.is_used = False  # until the first step or validation

    def __enter__(self) -> Self:
        self._start_time = time.monotonic()
        if self.console.is_terminal:
            # Refresh rarely: the thread that draws the bar competes with the computation.
            columns = (BarColumn(bar_width=16), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self.console, refresh_per_second=4, transient=True)
            endless = self.config.max_steps is None and self.config.max_minutes is None
            self._task = self._bar.add_task("first step ...", total=None if endless else 1.0)
            self._bar.start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError):
                self._bar.stop()

    def __call__(self, event: Event, loop: object = None) -> None:
        """Show an event. Training continues if the terminal or pipe has been closed."""
        self.is_used |= isinstance(event, Step | Validation)
        with contextlib.suppress(OSError):
            if isinstance(event, Start) and event.step:
                self.console.print(f"resuming after step {event.step:,}")
            elif isinstance(event, Validation):
                self._validation = _summarize_validation(event)
                self.console.print(describe_validation(event))
            elif isinstance(event, Step):
                self._show_step(event)

    def _show_step(self, step: Step) -> None:
        self._num_smoothed += 1
        decay = min(_SMOOTHING, 1.0 - 1.0 / self._num_smoothed)
        self._loss = decay * self._loss + (1.0 - decay) * step.loss
        self._speed = decay * self._speed + (1.0 - decay) * step.tokens_per_second
        fraction, seconds_left = self._remaining(step)
        text = f"step {step.step:,}  loss {format_number(self._loss, 3)}  {self._speed:,.0f} {self.unit}/s"
        if seconds_left is not None:
            text += f"  {format_duration(seconds_left)} left"
        if self._bar is not None:
            text += f"  {self._validation}" if self._validation else ""
            self._bar.update(self._task, description=text, completed=fraction)
        elif time.monotonic() - self._last_line_time >= _SECONDS_BETWEEN_LINES:
            self._last_line_time = time.monotonic()
            self.console.print(text)

    def _remaining(self, step: Step) -> tuple[float, float | None]:
        """Return the completed fraction of the run and the seconds left, by the limit that is reached first."""
        max_steps, max_minutes = self.config.max_steps, self.config.max_minutes
        fraction, seconds_left = 0.0, None
        if self._first_step is None:  # it does not count: jit traces, and JAX compiles
            self._first_step, self._start_time = step.step, time.monotonic()
        if max_steps is not None:
            fraction = step.step / max_steps
            if (num_steps := step.step - self._first_step) > 0:
                seconds_left = (time.monotonic() - self._start_time) / num_steps * (max_steps - step.step)
        if max_minutes is not None:
            fraction = max(fraction, step.minutes / max_minutes)
            by_clock = max(0.0, 60.0 * (max_minutes - step.minutes))
            seconds_left = by_clock if seconds_left is None else min(seconds_left, by_clock)
        return min(fraction, 1.0), seconds_left


def _summarize_validation(validation: Validation) -> str:
    score = "" if validation.score is None else f", {validation.metric} {validation.score:.2f}"
    return f"valid: perplexity {format_number(validation.perplexity)}{score}"


def describe_validation(validation: Validation) -> str:
    """Return one line about a validation."""
    score = "" if validation.score is None else f"  {validation.metric} {validation.score:.2f}"
    best = "  (best so far)" if validation.best else ""
    averaged = f"average of {len(validation.steps)} checkpoints: " if isinstance(validation, Average) else ""
    return (
        f"{averaged}validation after step {validation.step:,}  epoch {validation.epoch + 1}  "
        f"{format_duration(60.0 * validation.minutes)}  loss {format_number(validation.loss, 4)}  "
        f"perplexity {format_number(validation.perplexity)}{score}{best}"
    )


def format_duration(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    total = round(seconds)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"
