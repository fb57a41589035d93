"""The fastest of several ways to compute the same, measured once for a shape and a device and kept in a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from xformer.io import CacheFile
from xformer.kernels.cupy.launch import cuda
from xformer.threads import fork_safe_lock

_RESULTS, _LOCK = CacheFile("fastest_products.json"), fork_safe_lock()
_BEFORE, _REPETITIONS = 4, 2  # calls that keep the GPU busy while the host enqueues the one that is measured
_MIN_GAIN = 0.97  # relative time from which another way than the first is worth while


def fastest(identity: str, key: str, ways: Sequence[Callable[[], Any]]) -> int | None:
    """Return the number of the fastest of functions that enqueue work, or None while a graph captures the stream.

    Args:
        identity: What the times depend on, besides the key: a device and versions.
        key: What is computed.
        ways: The functions. The first one is returned unless another is clearly faster.
    """
    with _LOCK:  # all threads take the same
        known = _RESULTS.get(identity, key)
        if type(known) is int and 0 <= known < len(ways):
            return known
        if cuda().get_current_stream().is_capturing():
            return None
        times = [_milliseconds(way) for way in ways]
        times[0] *= _MIN_GAIN
        best = times.index(min(times))
        _RESULTS.set(identity, key, best)
        return best


def _milliseconds(way: Callable[[], Any]) -> float:
    """Return the time of a function on the GPU; infinity if it fails."""
    stream, times = cuda().get_current_stream(), []
    try:
        for _ in range(_REPETITIONS):
            for _ in range(_BEFORE):
                way()
            start, end = cuda().Event(), cuda().Event()
            start.record(stream)
            way()
            end.record(stream)
            end.synchronize()
            times.append(cuda().get_elapsed_time(start, end))
    except (RuntimeError, MemoryError):
        return math.inf
    return float(min(times))
