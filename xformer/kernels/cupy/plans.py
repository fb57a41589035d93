"""What plans of NVIDIA's libraries share: where they run, that the last ones are kept, and that failures are told once.

A plan is what a library prepares for one shape; making it takes longer than running it.
"""

from __future__ import annotations

import functools
import importlib
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from xformer.kernels.cupy.launch import cuda

_MOST_FAILURES = 1024


def current() -> tuple[int, int]:
    """The current device, and the address of its current stream."""
    return cuda().runtime.getDevice(), cuda().get_current_stream().ptr


@functools.cache
def machine(device: int) -> tuple[str, int]:
    """The name of a device and its compute capability, 90 for 9.0."""
    found = cuda().runtime.getDeviceProperties(device)
    return found["name"].decode(), 10 * found["major"] + found["minor"]


def workspace(size: int) -> Any:
    """Memory from CuPy's pool, which hands it out again only to what comes later on the same stream."""
    cupy = importlib.import_module("cupy")
    return cupy.empty(max(size, 1), dtype=cupy.uint8)


class Plans(threading.local):
    """The plans that each thread used last, at most so many: handles of these libraries are not to be shared."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The plan for a key, made if there is none; a None that was made is not kept."""
        found = self._plans.get(key)
        if found is None:
            found = make()
            if found is None:
                return None
            self._plans[key] = found
            if len(self._plans) > self.most:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return found

    def __iter__(self) -> Any:
        return iter(self._plans)


class Failures:
    """Why there are no plans for some keys."""

    def __init__(self) -> None:
        self._reasons: dict[Hashable, str] = {}

    def get(self, key: Hashable) -> str | None:
        """The reason for a key, if there is one."""
        return self._reasons.get(key) if self._reasons else None

    def add(self, key: Hashable, reason: str, warning: str) -> None:
        """Remember a reason, and give the warning where it is new."""
        if key in self._reasons:
            return
        while len(self._reasons) >= _MOST_FAILURES:
            self._reasons.pop(next(iter(self._reasons)), None)
        self._reasons[key] = reason
        warnings.warn(warning, RuntimeWarning, stacklevel=3)


def line(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
