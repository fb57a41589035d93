"""Terminal output: progress, and how to call this program."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from xformer.runs.console import progress_bar


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
def percent_progress(text: str, *, visible: bool = True) -> Iterator[Callable[[float, float], None]]:
    """Show the percentage of a task on stderr, if it is a terminal; yields a function of the parts done and all parts.

    Args:
        text: Description of the task, e.g. "loading".
        visible: Pass False if the output goes to the same terminal.
    """
    with progress_bar(text, total=1.0, visible=visible) as update:
        yield lambda done, total: update(description=f"{text}  {100 * done / total:.0f} %", completed=done / total)
