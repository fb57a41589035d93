"""Gradients of a batch in shards, one Python thread each.

NumPy releases the interpreter lock inside its loops and products, so two threads that each take half of a batch,
with the linear algebra library held to one thread, keep two cores busy all the time; a single thread would leave one
idle in everything that is not a matrix product.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from xformer.autodiff import value_and_grad
from xformer.namespace import array_namespace, library
from xformer.tree import flatten, map_arrays


def available_threads() -> int:
    """How many threads training may use: XFORMER_NUM_THREADS, or the cores this process may run on."""
    setting = os.environ.get("XFORMER_NUM_THREADS", "")
    if setting.isdigit() and int(setting) > 0:
        return int(setting)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def one_blas_thread() -> Iterator[bool]:
    """Hold the linear algebra library to one thread inside the block; yields False where that is not possible."""
    if importlib.util.find_spec("threadpoolctl") is None:
        yield False
        return
    with importlib.import_module("threadpoolctl").threadpool_limits(1, user_api="blas"):
        yield True


class ShardedGradient:
    """value_and_grad of a sum over shards: `value, gradients = sharded(model, shards, rngs)`.

    function: (model, shard, rng) -> scalar. With one shard, or a library that runs its own threads, shards simply
    follow each other. Shards are added up in order, so the result does not depend on which thread was first.
    """

    def __init__(self, function: Callable[..., Any], threads: int) -> None:
        self._differentiated = value_and_grad(function)
        self._pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def __call__(self, model: Any, shards: Sequence[Any], rngs: Sequence[Any]) -> tuple[Any, Any]:
        if self._pool is None or len(shards) == 1:
            results = list(map(self._differentiated, [model] * len(shards), shards, rngs))
        else:
            results = list(self._pool.map(self._differentiated, [model] * len(shards), shards, rngs))
        value, gradients = results[0]
        for other_value, other_gradients in results[1:]:
            value = value + other_value
            gradients = map_arrays(_add, gradients, other_gradients)
        return value, gradients

    def close(self) -> None:
        """Let the threads go."""
        if self._pool is not None:
            self._pool.shutdown()


def _add(a: Any, b: Any) -> Any:
    return a + b


def shards_for(model: Any, threads: int) -> int:
    """Into how many shards a batch is worth splitting: as many as threads on NumPy, one elsewhere."""
    leaves = flatten(model)[0]
    return threads if library(array_namespace(leaves[0])) == "numpy" else 1
