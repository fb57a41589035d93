"""Handle Ctrl-C as a request to stop: the current update or validation batch finishes, and the state is saved."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

Item = TypeVar("Item")

# Sent by Ctrl-C, by the system or a scheduler, and by a terminal that is closed.
_STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Stopped(KeyboardInterrupt):
    """A signal requested to stop, and work was left unfinished."""


class StopRequest:
    """A flag that a signal sets."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


# The request of the enclosing stop_on_signals block; the threads of parallel_map see it, too.
_REQUEST: ContextVar[StopRequest] = ContextVar("request")


def check_stop() -> None:
    """Raise Stopped, with the name of the signal, if a signal requested to stop."""
    request = _REQUEST.get(None)
    if request:
        raise Stopped(f"stopped by {request.signal_name}")


def until_stopped(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; raise Stopped after the first item during which a signal arrived."""
    for item in items:
        yield item
        check_stop()


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT, SIGTERM or SIGHUP inside the block into a StopRequest; a second SIGINT interrupts at once.

    Ignored signals, as under nohup, stay ignored. Signals can be caught in the main thread only; in other threads the
    request stays false.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def request_stop(number: int, frame: Any) -> None:
        request.signal_name = signal.Signals(number).name
        again = ""
        if previous[signal.SIGINT] != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            again = "; a second Ctrl-C ends at once"
        logging.getLogger("xformer").info(f"stopping as soon as the state is saved{again}")

    previous = {number: signal.getsignal(number) for number in _STOPPING}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, request_stop)
    outer = _REQUEST.set(request)
    try:
        yield request
    finally:
        _REQUEST.reset(outer)
        for number, handler in previous.items():
            signal.signal(number, handler)
