"""Handle Ctrl-C as a request to stop: the current step or validation batch finishes, and the state is saved."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

Item = TypeVar("Item")

# Sent by Ctrl-C, by the system or a scheduler, by a terminal that is closed, and by Ctrl-Break on Windows.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
_STOPPING = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal requested to stop, and work was left unfinished."""


# Names of the signals that arrived in the enclosing stop_on_signals block; the threads of parallel_map see it, too.
_SIGNALS: ContextVar[Sequence[str]] = ContextVar("signals", default=())


def check_stop() -> None:
    """Raise Stopped, with the name of the signal, if a signal requested to stop."""
    if names := _SIGNALS.get():
        raise Stopped(f"stopped by {names[-1]}")


def until_stopped(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; raise Stopped after the first item during which a signal arrived."""
    for item in items:
        yield item
        check_stop()


@contextlib.contextmanager
def stop_on_signals(*, raises: bool = True) -> Iterator[list[str]]:
    """Turn the first SIGINT, SIGTERM, SIGHUP or SIGBREAK inside the block into a request to stop.

    A second SIGINT interrupts at once. Ignored signals, as under nohup, stay ignored. Signals can be caught in the main
    thread only; in other threads the list stays empty.

    Args:
        raises: Whether `check_stop` raises inside the block. Several ranks must stop at the same step instead.

    Yields:
        The names of the signals that have arrived.
    """
    names: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield names
        return

    def request_stop(number: int, frame: Any) -> None:
        names.append(signal.Signals(number).name)
        again = ""
        if previous[signal.SIGINT] != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            again = "; a second Ctrl-C ends at once"
        logging.getLogger("xformer").info(f"stopping as soon as the state is saved{again}")

    previous = {number: signal.getsignal(number) for number in _STOPPING}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, request_stop)
    outer = _SIGNALS.set(names if raises else ())
    try:
        yield names
    finally:
        _SIGNALS.reset(outer)
        for number, handler in previous.items():
            signal.signal(number, handler)
