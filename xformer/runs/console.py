"""The console, and the formatting of numbers."""

from __future__ import annotations

import sys
from typing import Any

from xformer.text.extras import require

_WIDTH_WITHOUT_TERMINAL = 110  # of tables
SECONDS_BETWEEN_LINES = 10.0  # of progress that is not on a terminal


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
