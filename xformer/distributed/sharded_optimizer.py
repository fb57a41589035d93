"""An optimizer whose state is divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.backends import Array
from xformer.distributed.communicator import Communicator
from xformer.tree import flatten, flatten_parameters


class ShardedOptimizer:
    """Keep the optimizer state of each parameter on one rank only (stage 1 of ZeRO; Rajbhandari et al., 2020).

    Each rank updates the parameters that it owns, and sends them to the others. The result is bit-identical to
    that of an update of all parameters on every rank. Adam then needs about 8 / size bytes per parameter for its state
    instead of 8; while the state is saved, every rank has all of it.

    Args:
        optimizer: The optimizer that updates the parameters of each rank.
        communicator: The ranks.
    """

    def __init__(self, optimizer: Any, communicator: Communicator) -> None:
        self.optimizer, self.communicator = optimizer, communicator

    def init(self, model: Any) -> Any:
        """Return the state of the parameters that this rank owns: trees like a list of them."""
        return self.optimizer.init(self._own(flatten_parameters(model)[0]))

    def update(self, model: Any, grads: Any, state: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        """Make one update; see `Optimizer.update`."""
        leaves, rebuild = flatten_parameters(model)
        own = self._own(leaves), self._own(flatten_parameters(grads)[0])
        updated, state = self.optimizer.update(*own, state, *args, **options)
        owners, new = self._owners(leaves), iter(updated)
        mine = [
            next(new) if owner == self.communicator.rank else leaf for owner, leaf in zip(owners, leaves, strict=True)
        ]
        return rebuild(self.communicator.share(mine, owners)), state

    def gather_state(self, model: Any, state: Any) -> Any:
        """Return the state of all parameters, as the optimizer alone has it; a checkpoint contains it."""
        leaves, rebuild = flatten_parameters(model)
        owners, rank = self._owners(leaves), self.communicator.rank

        def gather(zeros: Any, own: Any) -> Any:
            if zeros is None:
                return None
            mine = iter(own)
            arrays = [next(mine) if owner == rank else zero for zero, owner in zip(zeros, owners, strict=True)]
            return rebuild(self.communicator.share(arrays, owners), keep=False)

        return type(state)(state[0], *map(gather, self._zeros(leaves), state[1:]))

    def shard_state(self, model: Any, state: Any) -> Any:
        """Return the part of the state of all parameters that this rank keeps."""
        leaves, _ = flatten_parameters(model)

        def shard(zeros: Any, tree: Any) -> Any:
            if zeros is None:
                return None
            arrays = iter(flatten(tree)[0])
            return self._own([None if zero is None else next(arrays) for zero in zeros], leaves)

        return type(state)(state[0], *map(shard, self._zeros(leaves), state[1:]))

    def _zeros(self, leaves: list[Array]) -> list[Any]:
        """Return, for each statistic, a list of its values for all parameters before the first update, or None."""
        return list(self.optimizer.init(leaves)[1:])

    def _owners(self, leaves: Sequence[Array]) -> list[int]:
        """Return the owner of each parameter: the largest ones first, each to the rank with the fewest elements."""
        owners, loads = [0] * len(leaves), [0] * self.communicator.size
        for index in sorted(range(len(leaves)), key=lambda index: -leaves[index].size):
            owners[index] = min(range(len(loads)), key=loads.__getitem__)
            loads[owners[index]] += leaves[index].size
        return owners

    def _own(self, items: Sequence[Any], leaves: Sequence[Array] | None = None) -> list[Any]:
        """Return the items, one for each parameter, of those that this rank owns."""
        owners = self._owners(items if leaves is None else leaves)
        return [item for item, owner in zip(items, owners, strict=True) if owner == self.communicator.rank]
