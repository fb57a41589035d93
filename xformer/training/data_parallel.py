"""Data parallelism: the threads of all ranks differentiate shards of a batch.

In NumPy only matrix products use several cores on their own. NumPy releases the GIL inside its loops and products, so
threads suffice to parallelize the rest. `xformer.distributed` connects ranks, which are processes.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from xformer import tracing
from xformer.backends import array_namespace, device
from xformer.distributed import Communicator, OverlappedSum, SingleProcess, tree_sum
from xformer.errors import ConfigError, DataError, describe_type
from xformer.native import is_reproducible
from xformer.random import Rng, split_rng
from xformer.threads import blas_threads, num_threads, parallel_map
from xformer.tracing.jit import has_effect, jit_repeated
from xformer.training.step import ValueAndGrad
from xformer.tree import first_array, flatten, flatten_parameters, is_array, map_arrays


def data_parallel(
    num_workers: int | None = None, *, jit: bool = False, communicator: Communicator | None = None
) -> ValueAndGrad:
    """Return a replacement for `value_and_grad` that computes the shards of a batch on threads, and on several ranks.

    A batch with a method `split(n)` -> list of at most n batches is split into `num_workers` shards, and the BLAS
    library gets one thread for each. Any other batch is one shard, with all BLAS threads. The loss must be a sum over
    the batch, so that the shards' losses add up to it. Losses and gradients are added in the order of `tree_sum`, and
    each shard has its own Rng, so the exact bits depend on `num_workers`, not on timing or the number of cores. They do
    not depend on the number of ranks either, as long as each rank has 1, 2, 4, ... shards.

    Args:
        num_workers: Number of shards, of all ranks together; default `default_num_workers(model, communicator)`.
        jit: Whether to trace the loss by `xformer.jit` for shards whose shapes repeat.
        communicator: The ranks, each of which computes neighboring shards; default this process alone.

    Raises:
        ConfigError: If the shards cannot be divided among the ranks.
    """
    return sharded(jit_repeated(differentiate) if jit else differentiate, num_workers, communicator)


def sharded(
    function: Callable[..., Any], num_workers: int | None = None, communicator: Communicator | None = None
) -> ValueAndGrad:
    """Return `data_parallel` with another function than `differentiate`, such as a jitted one, for each shard."""
    ranks = communicator or SingleProcess()
    if num_workers is not None:
        check_shards(num_workers, ranks)

    def value_and_grad(loss_fn: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
        def call(model: Any, batch: Any, rng: Rng | None = None, *args: Any) -> tuple[Any, Any]:
            like = first_array(model)
            xp = array_namespace(like)
            if function is not differentiate and has_effect(xp):  # the weight of the loss may change in each call
                args = tuple(
                    xp.from_host(np.asarray(arg), device=device(like)) if isinstance(arg, float) else arg
                    for arg in args
                )
            count = num_workers or default_num_workers(model, communicator)
            shards = split_batch(batch, count)
            if ranks.size == 1 and len(shards) == 1:
                return function(loss_fn, model, shards[0], split_rng(rng, 1)[0], *args)
            items = list(zip(shards, split_rng(rng, len(shards)), strict=True))
            if ranks.size > 1 and not can_split(batch):
                raise ConfigError(f"a batch is {describe_type(batch)}; several ranks expect one with a method split(n)")
            per_rank = _shards_per_rank(len(items), count, ranks.size) if ranks.size > 1 else len(items)
            own = items[ranks.rank * per_rank : (ranks.rank + 1) * per_rank]
            with blas_threads(1):
                if ranks.size > 1 and ranks.overlaps:
                    return _differentiate_and_sum(loss_fn, model, own, items[:1], args, ranks)
                results = parallel_map(lambda item: function(loss_fn, model, *item, *args), own or items[:1])
            total = tree_sum(results, partial(map_arrays, operator.add))
            loss, grads = total if own else map_arrays(_nothing, total)
            leaves, rebuild = flatten(grads)
            return ranks.all_reduce([loss], exact=True)[0], rebuild(ranks.all_reduce(leaves))

        return call

    return value_and_grad


def check_shards(count: int, communicator: Communicator) -> None:
    """Raise ConfigError if the shards of a batch cannot be divided among the ranks; all ranks must call it."""
    if count % communicator.size:
        raise ConfigError(f"data_parallel is {count}; expected a multiple of the {communicator.size} ranks")
    counts = communicator.all_gather(count)
    if len(set(counts)) > 1:  # the default is that of the threads of each rank
        raise ConfigError(f"data_parallel is {counts} on the ranks; expected the same number, so set it")


def _shards_per_rank(available: int, count: int, size: int) -> int:
    """Return the number of neighboring shards of each rank; a small batch has fewer than `count`.

    These are divided by a power of two, so that each rank computes a subtree of `tree_sum`.
    """
    return min(count // size, 2 ** math.ceil(math.log2(-(-available // size))))


def _nothing(array: Any) -> Any:
    """Return the sum of a rank without shards, which a small batch has: -0.0, to which x adds as x."""
    return array_namespace(array).full_like(array, -0.0)


def _differentiate_and_sum(
    loss_fn: Callable[..., Any], model: Any, own: Sequence[Any], others: Sequence[Any], args: Any, ranks: Communicator
) -> tuple[Any, Any]:
    """Return the loss and the gradient of all ranks; gradients are added while the backward pass computes others."""
    leaves, rebuild = flatten_parameters(model)
    items = own or others
    sums = OverlappedSum(ranks, leaves, len(items))

    def loss_of(shard: int) -> Any:
        def add(number: int, gradient: Any) -> None:
            sums.add(shard, number, gradient if own else _nothing(gradient))

        return tracing.value_and_grad(loss_fn, on_gradient=add)(model, *items[shard], *args)[0]

    with sums.running():
        losses = parallel_map(loss_of, range(len(items)))
    loss = tree_sum(losses)
    return ranks.all_reduce([loss if own else _nothing(loss)], exact=True)[0], rebuild(sums.totals, keep=False)


def differentiate(loss_fn: Callable[..., Any], *args: Any) -> Any:
    """Return the value and the gradient of a loss."""
    return tracing.value_and_grad(loss_fn)(*args)


def split_batch(batch: Any, count: int) -> Sequence[Any]:
    """Return the shards of a batch: `batch.split(count)`, or the batch itself if it cannot be split."""
    if count < 2 or not can_split(batch):
        return [batch]
    shards = batch.split(count)
    if not isinstance(shards, list | tuple) or not 0 < len(shards) <= count:
        received = f"{describe_type(batch)}.split({count}) returned {shards!r:.80}"
        raise DataError(f"{received}; expected a list of 1 to {count} batches")
    return shards


def can_split(batch: Any) -> bool:
    """Return whether a batch has the method `split(n)`; those of texts and of torch tensors are different ones."""
    return not is_array(batch) and _has_split(type(batch))  # type: ignore[arg-type] # classes have a hash


@functools.cache
def _has_split(cls: type) -> bool:
    method = getattr(cls, "split", None)
    if not callable(method) or issubclass(cls, str | bytes | bytearray):
        return False
    try:
        inspect.signature(method).bind(None, 1)
    except TypeError:
        return False
    return True


def default_num_workers(model: Any, communicator: Communicator | None = None) -> int:
    """Return the default number of shards of a batch: one for each thread on NumPy, else one for each rank.

    With a communicator on NumPy, or in reproducible mode, 8 for every number of ranks that divides 8, so that the bits
    are the same; otherwise the next multiple of the number of ranks.
    """
    size = 1 if communicator is None else communicator.size
    if not is_numpy(model):
        return size
    return num_threads() if communicator is None and not is_reproducible() else math.ceil(8 / size) * size


def is_numpy(model: Any) -> bool:
    """Return whether the arrays of a model are those of NumPy."""
    return array_namespace(first_array(model)).name == "numpy"
