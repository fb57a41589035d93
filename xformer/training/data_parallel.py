"""Data parallelism on the cores of a CPU: each thread differentiates a shard of the batch.

In NumPy only matrix products use several cores on their own. NumPy releases the GIL inside its loops and products, so
threads suffice to parallelize the rest.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xformer import autodiff
from xformer.backends import array_namespace, backend_name
from xformer.random import Rng, split_rng
from xformer.replay.function import capture_if_repeated
from xformer.threads import blas_threads, num_threads, parallel_map
from xformer.training.step import ValueAndGrad
from xformer.tree import flatten, is_array, map_arrays


def data_parallel(num_workers: int | None = None, *, capture: bool = False) -> ValueAndGrad:
    """Return a replacement for `value_and_grad` that computes the shards of a batch on threads.

    A batch with a method `split(n)` -> list of at most n batches is split into `num_workers` shards, and the BLAS
    library gets one thread for each. Any other batch is one shard, with all BLAS threads. The loss must be a sum over
    the batch, so that the shards' losses add up to it. Losses and gradients are summed in the order of the shards, and
    each shard has its own Rng, so the exact bits depend on `num_workers`, not on timing or the number of cores.

    Args:
        num_workers: Number of shards; default `num_threads()`.
        capture: Whether to record the work of shards whose shapes repeat, and replay it (see `xformer.capture`).
    """
    differentiate = capture_if_repeated(_differentiate) if capture else _differentiate

    def value_and_grad(loss_fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        def sharded(model: Any, batch: Any, rng: Rng | None = None, *args: Any) -> tuple[Any, Any]:
            if capture and is_numpy(model):  # numbers such as the weight of the loss are data of a recording
                args = tuple(np.asarray(arg) if isinstance(arg, float) else arg for arg in args)
            shards = split_batch(batch, num_workers or num_threads())
            items = list(zip(shards, split_rng(rng, len(shards)), strict=True))
            with blas_threads(1) if len(items) > 1 else contextlib.nullcontext():
                results = parallel_map(lambda item: differentiate(loss_fn, model, *item, *args), items)
            total: tuple[Any, Any] = functools.reduce(
                lambda total, result: map_arrays(operator.add, total, result), results
            )
            return total

        return sharded

    return value_and_grad


def _differentiate(loss_fn: Callable[..., Any], *args: Any) -> Any:
    return autodiff.value_and_grad(loss_fn)(*args)


def split_batch(batch: Any, count: int) -> Sequence[Any]:
    """Return the shards of a batch: `batch.split(count)`, or the batch itself if it cannot be split."""
    if count < 2 or not can_split(batch):
        return [batch]
    return batch.split(count)


def can_split(batch: Any) -> bool:
    """Return whether a batch has the method `split`; the `split` of a torch tensor is a different one."""
    return hasattr(batch, "split") and not is_array(batch)


def default_num_workers(model: Any) -> int:
    """Return the default number of shards of a batch: one for each thread on NumPy, else 1."""
    return num_threads() if is_numpy(model) else 1


def is_numpy(model: Any) -> bool:
    """Return whether the arrays of a model are those of NumPy."""
    return backend_name(array_namespace(flatten(model)[0][0])) == "numpy"
