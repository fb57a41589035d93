"""Work on a batch, and on the model's arrays, by several Python threads.

NumPy releases the interpreter lock inside its loops and products, so two threads that each take half of a batch,
with the linear algebra library held to one thread, keep two cores busy all the time; a single thread would leave one
idle in everything that is not a matrix product.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from xformer.autodiff import value_and_grad
from xformer.host import available_threads as available_threads
from xformer.host import one_blas_thread as one_blas_thread
from xformer.host import side_by_side
from xformer.namespace import array_namespace, library
from xformer.training.worker import Team
from xformer.tree import flatten

_FEWEST_ELEMENTS = 1 << 19  # below this, handing work to other threads costs more than it saves


class ShardedGradient:
    """value_and_grad of a sum over shards: `value, gradients = sharded(model, shards, rngs)`.

    function: (model, shard, rng) -> scalar. workers: how many shards are worked on at a time. processes: give each
    shard after the first a process of its own instead of a thread; then the function must be importable by name.
    Without several workers, or shards, shards simply follow each other. They are added up in order, so the result
    does not depend on who was first, nor on where the work was done.
    """

    def __init__(self, function: Callable[..., Any], workers: int, *, processes: bool = False) -> None:
        self._function, self._workers, self._processes = function, workers, processes
        self._differentiated = value_and_grad(function)
        self._team: Team | None = None

    def __call__(self, model: Any, shards: Sequence[Any], rngs: Sequence[Any]) -> tuple[Any, Any]:
        def differentiate(item: tuple[Any, Any]) -> Any:
            return self._differentiated(model, *item)

        items = list(zip(shards, rngs, strict=True))
        if self._workers == 1 or len(items) == 1:
            results = [differentiate(item) for item in items]
        elif self._processes:
            results = self._team_for(model, len(items) - 1).differentiate(model, items, differentiate)
        else:
            results = side_by_side(differentiate, items)
        values, trees = zip(*results, strict=True)
        return functools.reduce(operator.add, values), _total(trees)

    def close(self) -> None:
        """End the worker processes, if there are any."""
        if self._team is not None:
            self._team.close()
        self._team = None

    def _team_for(self, model: Any, size: int) -> Team:
        if self._team is not None and not self._team.fits(model, size):
            self.close()
        if self._team is None:
            self._team = Team(self._function, model, size)
        return self._team


def _total(trees: Sequence[Any]) -> Any:
    """Add up trees of the same structure, in order."""
    if len(trees) == 1:
        return trees[0]
    rebuild = flatten(trees[0])[1]
    columns = zip(*(flatten(tree)[0] for tree in trees), strict=True)
    return rebuild(for_each_row(lambda *arrays: functools.reduce(operator.add, arrays), list(columns)))


def for_each_row(function: Callable[..., Any], rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Return [function(*row) for row in rows], on as many threads as pay for arrays of these sizes and library.

    rows: arrays that belong together, such as a parameter, its gradient and its moments.
    """
    sizes = [math.prod(row[0].shape) for row in rows]
    threads = shards_for([row[0] for row in rows], available_threads()) if sum(sizes) >= _FEWEST_ELEMENTS else 1
    if threads == 1:
        return [function(*row) for row in rows]
    results: list[Any] = [None] * len(rows)

    def work(part: list[int]) -> None:
        for index in part:
            results[index] = function(*rows[index])

    side_by_side(work, _parts_of_equal_size(sizes, threads))
    return results


def _parts_of_equal_size(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Deal indices out to `parts`, the largest first, each to the part that has the least so far."""
    dealt: list[list[int]] = [[] for _ in range(parts)]
    totals = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        least = totals.index(min(totals))
        dealt[least].append(index)
        totals[least] += sizes[index]
    return dealt


def shards_for(model: Any, threads: int) -> int:
    """Into how many shards a batch is worth splitting: as many as threads on NumPy, one elsewhere."""
    leaves = flatten(model)[0]
    return threads if library(array_namespace(leaves[0])) == "numpy" else 1
