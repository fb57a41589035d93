"""Ctrl-C as a request: the current update is finished and saved first."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

# Ctrl-C; the system or a scheduler; a terminal that was closed.
_STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class StopRequest:
    """Becomes true when the user asks to stop."""

    def __init__(self) -> None:
        self.signal_name: str | None = None

    def __bool__(self) -> bool:
        return self.signal_name is not None


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
        if previous[signal.SIGINT] != signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.getsignal(number) for number in _STOPPING}
    for number, handler in previous.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, remember)
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
