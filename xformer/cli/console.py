"""What the commands print with, and how they name themselves."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from rich.console import Console

# Where there is no terminal to ask, tables may be this wide.
_WIDTH_WITHOUT_TERMINAL = 110


class _Console(Console):
    """A console that lets a broken pipe be an error like others, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled."""
        raise


def make_console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr; text is printed as it is, without markup or colors of rich's choosing."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _WIDTH_WITHOUT_TERMINAL
    return _Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True, width=width)


def program() -> str:
    """How the user can call this program again: "xformer", or the path that reaches it from here."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{Path(sys.executable).name} -m xformer"
    # A nox session puts its environment on the path, but only while it runs.
    if "NOX_CURRENT_SESSION" not in os.environ and shutil.which("xformer"):
        return "xformer"
    if called.name == "xformer" and called.is_file():
        return os.path.relpath(called) if called.is_absolute() else str(called)
    return "xformer"


def short(value: float, decimals: int = 2) -> str:
    """Say a figure that may be of any size: losses and perplexities after training went wrong.

    >>> short(12.345), short(7e21)
    ('12.35', '7e+21')
    """
    return f"{value:.{decimals}f}" if abs(value) < 1e6 else f"{value:.3g}"


def plural(count: int, noun: str) -> str:
    """Say a count with its noun: "1 line", "2 lines"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
