"""Gradients of a batch in shards, worked on side by side.

A single thread leaves every core but one idle in everything that is not a matrix product. So each core gets a part of
the batch, with the linear algebra library held to one thread: on threads, since NumPy lets other threads run inside
its loops and products, or better on processes (see worker.py).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from xformer.autodiff import value_and_grad
from xformer.backends import array_namespace, backend_name
from xformer.shared_memory import can_share_memory
from xformer.threads import parallel_map, run_serially
from xformer.training.worker import WorkerPool
from xformer.tree import flatten, map_arrays


class ShardedGradient:
    """value_and_grad of a sum over shards: `value, gradients = sharded(model, shards, rngs)`.

    function: (model, shard, rng) -> scalar.
    workers: how many shards are worked on at a time, at most; with one, shards simply follow each other.
    processes: give every shard after the first a process of its own (on NumPy, where the system can share memory)
    instead of a thread. Threads of one process take turns in the interpreter, which costs about a tenth of a step;
    but a function for other processes must be importable by name, and so must all that shards hold.

    Shards are added up in order, so the result does not depend on who was first, nor on where the work was done.
    """

    def __init__(self, function: Callable[..., Any], workers: int, *, processes: bool = False) -> None:
        self._function, self._workers = function, workers
        self._processes = processes and can_share_memory()
        self._differentiated = value_and_grad(function)
        self._team: WorkerPool | None = None

    def __call__(self, model: Any, shards: Sequence[Any], rngs: Sequence[Any]) -> tuple[Any, Any]:
        """Return the sum of the function over all shards, and its gradient with respect to the model."""

        def differentiate(item: tuple[Any, Any]) -> tuple[Any, Any]:
            return self._differentiated(model, *item)  # type: ignore[no-any-return]

        items = list(zip(shards, rngs, strict=True))
        groups = (items[start : start + self._workers] for start in range(0, len(items), self._workers))
        results = (result for group in groups for result in self._at_once(model, group, differentiate))
        value, gradients = next(results)
        for other_value, other_gradients in results:
            value = value + other_value
            gradients = map_arrays(operator.add, gradients, other_gradients)
        return value, gradients

    def _at_once(self, model: Any, items: list[Any], differentiate: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
        if len(items) == 1:
            return [differentiate(items[0])]
        if self._processes and shards_for(model, self._workers) > 1:
            here = functools.partial(run_serially, differentiate)
            return self._team_for(model, len(items) - 1).differentiate(model, items, here)
        return parallel_map(differentiate, items)

    def close(self) -> None:
        """Let the processes go; the next call would start new ones."""
        if self._team is not None:
            self._team.close()
        self._team = None

    def _team_for(self, model: Any, size: int) -> WorkerPool:
        if self._team is not None and not self._team.fits(model, size):
            self.close()
        if self._team is None:
            self._team = WorkerPool(self._function, model, size)
        return self._team


def shards_for(model: Any, threads: int) -> int:
    """Into how many shards a batch is worth splitting: as many as threads on NumPy, one elsewhere."""
    leaves = flatten(model)[0]
    return threads if backend_name(array_namespace(leaves[0])) == "numpy" else 1
