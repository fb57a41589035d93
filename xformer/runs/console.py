"""The console, progress on it, and the formatting of numbers."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from xformer.text.extras import require

_WIDTH_WITHOUT_TERMINAL = 110  # of tables
_SECONDS_BETWEEN_LINES = 10.0  # of progress that is not on a terminal


def make_console(*, stderr: bool = False, quiet: bool = False) -> Any:
    """Return a console on stdout or stderr that prints text as it is, without markup or highlighting, or nothing."""

    class Console(require("rich.console").Console):  # type: ignore[misc]
        """A console on which a broken pipe is an ordinary error; rich would exit the process."""

        def on_broken_pipe(self) -> None:
            """Raise the BrokenPipeError that is being handled."""
            raise

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(stderr=stderr, quiet=quiet, highlight=False, markup=False, soft_wrap=True, width=width)


@contextlib.contextmanager
def progress_bar(
    text: str = "",
    *,
    total: float | None = None,
    console: Any = None,
    visible: bool = True,
    has_time: bool = True,
    per_second: float = 4.0,
) -> Iterator[Callable[..., None]]:
    """Yield a function that updates a progress bar and the text beside it, if there is a terminal to show them on.

    Args:
        text: The first text.
        total: Number of steps, if known.
        console: Console to show it on; default stderr.
        visible: Whether to show it.
        has_time: Show the time left.
        per_second: How often to draw it: the thread that does so competes with the computation.
    """
    console = make_console(stderr=True) if console is None and visible and sys.stderr.isatty() else console
    if console is None or not visible or not console.is_terminal:
        yield lambda **changes: None
        return
    rich = require("rich.progress")
    columns = [rich.BarColumn(bar_width=24), rich.TextColumn("{task.description}", markup=False)]
    columns += [rich.TimeRemainingColumn()] if has_time else []
    with rich.Progress(*columns, console=console, transient=True, refresh_per_second=per_second) as progress:
        yield functools.partial(progress.update, progress.add_task(text, total=total))


@contextlib.contextmanager
def progress_line(console: Any, text: str, total: float | None = None) -> Iterator[Callable[..., None]]:
    """Yield a function that shows a line: beside a bar on a terminal, otherwise every ten seconds, or at once.

    Args:
        console: Console to print on.
        text: The first line.
        total: Number of steps, if known.
    """
    last_time = time.monotonic()

    def show(text: str, *, at_once: bool = False, details: str = "", **changes: Any) -> None:
        nonlocal last_time
        update(description=f"{text}  {details}".rstrip(), **changes)
        if not console.is_terminal and (at_once or time.monotonic() - last_time >= _SECONDS_BETWEEN_LINES):
            last_time = time.monotonic()
            console.print(text)

    with progress_bar(text, total=total, console=console, has_time=False) as update:
        yield show


def format_number(value: float | None, decimals: int = 2) -> str:
    """Format a loss or a perplexity, which may be missing, or very large if training diverges.

    Examples:
        >>> format_number(12.345), format_number(7e21)
        ('12.35', '7e+21')
    """
    if value is None:
        return "-"
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: "1 line", "2 lines"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_duration(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss."""
    total = round(seconds)
    hours, minutes = divmod(total // 60, 60)
    return f"{hours}:{minutes:02}:{total % 60:02}" if hours else f"{minutes}:{total % 60:02}"
