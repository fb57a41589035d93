"""The entry point: the command line in a process of its own, every error one line."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

_NEEDED = ("typer", "rich")
_QUIET = {"train", "train-lm", "demo"}  # commands whose result is a directory: nobody need read what they print


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and end the process with its exit code.

    arguments: default those of the process.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stdout is None and not set(given[:1]) & _QUIET:
        print("error: standard output is closed; expected a place for what is printed", file=sys.stderr)
        sys.exit(2)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (`>&-`); what would go there is lost, as asked
            lost = open(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")  # noqa: SIM115 - for the whole process
            setattr(sys, name, lost)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a letter gets a question mark
    logger = logging.getLogger("xformer")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        logger.addHandler(_ToStderr())
    sys.exit(exit_code(given))


class _ToStderr(logging.StreamHandler[TextIO]):
    """Lines for whatever sys.stderr is by then: a progress bar puts itself there, and stays below."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def exit_code(arguments: list[str]) -> int:
    """Run the command line; returns its exit code, after printing any error as one line."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: xformer needs {' and '.join(missing)}; run: pip install {' '.join(missing)}", file=sys.stderr)
        return 2
    try:
        from xformer.cli.application import invoke
    except KeyboardInterrupt:
        return 130
    return invoke(arguments)
