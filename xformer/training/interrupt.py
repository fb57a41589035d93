"""Ctrl-C as a request: the update, or batch of a validation, under way is finished, and the state saved, first."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

Item = TypeVar("Item")

# Ctrl-C; the system or a scheduler; a terminal that was closed.
_STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """The user has asked to stop, and work was left unfinished."""


class StopRequest:
    """Becomes true when the user asks to stop."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


# Of the block that this code runs in; threads that share its work see the same.
_REQUEST: ContextVar[StopRequest] = ContextVar("request")


def check_stop() -> None:
    """Raise Stopped, which says by what, when the user has asked to stop."""
    request = _REQUEST.get(None)
    if request:
        raise Stopped(f"stopped by {request.signal_name}")


def until_stopped(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; after one during which the user asked to stop, raise Stopped."""
    for item in items:
        yield item
        check_stop()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT, SIGTERM or SIGHUP inside the block into a StopRequest; a second SIGINT interrupts at once.

    Signals that are ignored, as by nohup, stay so. In other threads than the main one signals cannot be caught; the
    request then stays false.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def remember(number: int, frame: Any) -> None:
        request.signal_name = signal.Signals(number).name
        again = ""
        if previous[signal.SIGINT] != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            again = "; a second Ctrl-C ends at once"
        logging.getLogger("xformer").info(f"stopping as soon as the state is saved{again}")

    previous = {number: signal.getsignal(number) for number in _STOPPING}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, remember)
    outer = _REQUEST.set(request)
    try:
        yield request
    finally:
        _REQUEST.reset(outer)
        for number, handler in previous.items():
            signal.signal(number, handler)
