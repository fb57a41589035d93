"""Terminal output: consoles, progress, and the formatting of numbers and of this program's name."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from xformer.pipelines import CorpusProgress
from xformer.runs.console import format_duration, make_console, plural, progress_bar, progress_line


def program() -> str:
    """Return the command that runs this program again: "xformer", or a path to it."""
    invoked = Path(sys.argv[0])
    if invoked.name == "__main__.py":
        return f"{Path(sys.executable).name} -m xformer"
    # A nox session puts its environment on the path, but only while it runs.
    is_on_path = "NOX_CURRENT_SESSION" not in os.environ and shutil.which("xformer")
    if is_on_path or invoked.name != "xformer":
        return "xformer"
    try:
        return os.path.relpath(invoked)
    except ValueError:  # on another drive of Windows
        return str(invoked)


def quote(path: Path) -> str:
    """Return a path as an argument of a command, quoted for the usual shells of the system if necessary."""
    return subprocess.list2cmdline([path]) if os.name == "nt" else shlex.quote(str(path))


@contextlib.contextmanager
def line_progress(total: int | None, *, visible: bool) -> Iterator[Callable[[int], None]]:
    """Show on stderr how many lines are done, if it is a terminal; yields a function that adds to the count.

    Args:
        total: Number of lines, if known.
        visible: Pass False if the output goes to the same terminal.
    """
    text = "{task.completed:,} lines done" if total is None else "{task.completed:,} of {task.total:,} lines"

    def columns(rich: Any) -> Iterable[Any]:
        lines = rich.TextColumn(text)
        if total is None:
            return lines, rich.TimeElapsedColumn()
        return rich.BarColumn(), lines, rich.TimeRemainingColumn()

    with progress_bar(columns, total=total, visible=visible) as update:
        yield lambda count: update and update(advance=count)


@contextlib.contextmanager
def corpus_progress() -> Iterator[Callable[[CorpusProgress], None]]:
    """Show the state of a corpus on stderr: in a progress bar on a terminal, otherwise every ten seconds."""
    start_time = time.monotonic()
    with progress_line(make_console(stderr=True), "reading ...") as show_line:

        def show(progress: CorpusProgress) -> None:
            text = f"{progress.num_done:,} of {progress.num_lines:,} lines"
            if new := progress.num_done - progress.num_resumed:
                speed = new / (time.monotonic() - start_time)
                left = format_duration((progress.num_lines - progress.num_done) / speed)
                text += f"  {format_speed(speed)}  {left} left"
            if progress.num_failed:
                text += f"  {plural(progress.num_failed, 'chunk')} failed"
            show_line(text, completed=progress.num_done, total=progress.num_lines)

        yield show


def format_speed(lines_per_second: float) -> str:
    """Format a speed: "1,200 lines/s", "0.25 lines/s"."""
    return f"{lines_per_second:,.0f} lines/s" if lines_per_second >= 10 else f"{lines_per_second:.2g} lines/s"


@contextlib.contextmanager
def percent_progress(text: str, *, visible: bool = True) -> Iterator[Callable[[float, float], None] | None]:
    """Show the percentage of a task on stderr, if it is a terminal; yields a function of the parts done and all parts.

    Args:
        text: Description of the task, e.g. "loading".
        visible: As for `line_progress`.
    """

    def columns(rich: Any) -> Iterable[Any]:
        yield rich.TextColumn("{task.description}", markup=False)
        yield from (rich.BarColumn(), rich.TextColumn("{task.percentage:.0f} %"), rich.TimeRemainingColumn())

    with progress_bar(columns, text=text, visible=visible) as update:
        yield None if update is None else lambda done, total: update(completed=done, total=total)
