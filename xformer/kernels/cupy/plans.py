"""Caches of the plans of cuBLASLt and cuDNN, and of the reasons why some plans cannot be built.

A plan is what a library prepares for one shape; building it takes longer than running it.
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

_MAX_FAILURES = 1024


def current() -> tuple[int, int]:
    """Return the current device and the address of its current stream."""
    return cuda().runtime.getDevice(), cuda().get_current_stream().ptr


@functools.cache
def device_properties(device: int) -> tuple[str, int]:
    """Return the name of a device and its compute capability, 90 for 9.0."""
    properties = cuda().runtime.getDeviceProperties(device)
    return properties["name"].decode(), 10 * properties["major"] + properties["minor"]


def workspace(size: int) -> Any:
    """Allocate bytes from CuPy's pool, which reuses them only for later work on the same stream."""
    cupy = importlib.import_module("cupy")
    return cupy.empty(max(size, 1), dtype=cupy.uint8)


class Plans(threading.local):
    """The most recently used plans, per thread, because threads must not share handles of these libraries."""

    def __init__(self, max_plans: int) -> None:
        self.max_plans = max_plans
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the plan of a key, from the cache or from `make`."""
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make()
            if len(self._plans) > self.max_plans:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return plan

    def __iter__(self) -> Any:
        return iter(self._plans)


class Failures:
    """The reasons why the plans of some keys cannot be built."""

    def __init__(self) -> None:
        self._reasons: dict[Hashable, str] = {}

    def get(self, key: Hashable) -> str | None:
        """Return the reason, or None."""
        return self._reasons.get(key) if self._reasons else None

    def add(self, key: Hashable, reason: str, warning: str | None) -> None:
        """Store a reason, and give the warning, if any, if the key is new."""
        if key in self._reasons:
            return
        while len(self._reasons) >= _MAX_FAILURES:
            self._reasons.pop(next(iter(self._reasons)), None)
        self._reasons[key] = reason
        if warning is not None:
            warnings.warn(warning, RuntimeWarning, stacklevel=3)


def one_line(error: BaseException) -> str:
    """Return the message of an error on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
