"""Training by several processes, called ranks: each computes a part of every batch, and gradients are summed.

`connect("mpi")` returns the communicator of a program that `mpiexec` has started; `fit(..., communicator=...)` and
`xformer train --distributed mpi` train with it. The sum has a fixed order, so the results of 1, 2 and 4 ranks
are bit-identical.
"""

from __future__ import annotations

from xformer.distributed.communicator import Communicator, SingleProcess, broadcast, tree_sum
from xformer.distributed.connect import abort_on_error, connect
from xformer.distributed.sharded_optimizer import ShardedOptimizer

__all__ = ["Communicator", "ShardedOptimizer", "SingleProcess", "abort_on_error", "broadcast", "connect", "tree_sum"]
