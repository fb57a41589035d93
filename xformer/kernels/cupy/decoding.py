"""Decoding on CuPy without the host: the choice of tokens (cuda/decoding.cu), and results that are read later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xformer.kernels.cupy import launch
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, why_not
from xformer.ops.operation import Kernel


def choose(logits: Any, tokens: Any, counts: Any, mask: Any, found: Any) -> None:
    """Write the most probable token of each row and its log-probability, where the host or the next step reads them.

    Args:
        logits: (rows, vocabulary).
        tokens: Receives the ids, int64 (rows, 1), or None.
        counts: Number of steps of each row, int64 (rows,), which is counted up; None for one step.
        mask: Tokens that are not chosen, booleans (vocabulary,), or None.
        found: Receives ids and log-probabilities, float32 or float64 (slots, rows, 2), whose slots steps take in turn.
    """
    logits, (rows, n) = contiguous(logits), logits.shape
    threads = min(1024, -(-n // 128) * 32)
    arrays = logits, mask, found, tokens, counts
    launch.launch("decoding.choose", dtype_names(logits, found), rows, threads, *arrays, rows, n, len(found))


def _best_forward(logits: Any, *, save: bool) -> tuple[Any, Any]:
    found = empty(logits, (1, len(logits), 2), launch.compute_dtype(logits))
    choose(logits, None, None, None, found)
    return found[0], None


def read_later(array: Any) -> Callable[[], Any]:
    """Return a function that copies an array to the host as it is now, and waits for no later work on the stream."""
    event = launch.cuda().get_current_stream().record()

    def read() -> Any:
        stream = _reading_stream(launch.cuda().runtime.getDevice())
        stream.wait_event(event)
        return array.get(stream=stream)

    return read


@functools.cache
def _reading_stream(device: int) -> Any:
    return launch.cuda().Stream(non_blocking=True)


KERNELS = [Kernel("cupy.best", "best", "cupy", _best_forward, None, dtypes=FLOATS, why_not=why_not)]
