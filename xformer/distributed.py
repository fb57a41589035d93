"""Training by several processes, called ranks: each computes a part of every batch, and gradients are summed.

`connect("mpi")` returns the communicator of a program that `mpiexec` has started; `fit(..., communicator=...)` and
`xformer train --distributed mpi` train with it. The sum has a fixed order, so the results of 1, 2 and 4 ranks
are bit-identical.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import operator
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from xformer.backends import Array, array_namespace, device, resolve, to_host
from xformer.errors import BackendError, ConfigError, XformerError, how_to_install
from xformer.tree import flatten, flatten_parameters

__all__ = ["Communicator", "ShardedOptimizer", "SingleProcess", "abort_on_error", "broadcast", "connect", "tree_sum"]


def __dir__() -> list[str]:
    return list(__all__)


# --- The exchange of arrays between ranks, and sums whose bits do not depend on the number of ranks -------------------

Item = TypeVar("Item")
_BLOCK = 2**15  # elements that NumPy converts at a time, in the cache
_QUIET_NAN = 0x7FC0
_BUCKET_BYTES = 2**25  # limits the memory of a sum; time per byte is the same from about 1 MiB on


def tree_sum(items: Sequence[Item], add: Callable[[Item, Item], Item] = operator.add) -> Item:
    """Add neighbors, then neighboring sums, until one is left.

    A rank that adds 2**k neighboring items computes a subtree, so the bits of the sum do not depend on which rank adds
    what.

    Args:
        items: At least one item.
        add: Adds two items.

    Examples:
        >>> tree_sum(["a", "b", "c", "d", "e"], lambda left, right: f"({left}{right})")
        '(((ab)(cd))e)'
    """
    items = list(items)
    while len(items) > 1:
        pairs = (items[start : start + 2] for start in range(0, len(items), 2))
        items = [pair[0] if len(pair) == 1 else add(*pair) for pair in pairs]
    return items[0]


class Communicator:
    """Exchanges data between the ranks of a program; all ranks call the same methods in the same order.

    A subclass moves arrays by three methods: `_all_to_all`, `_all_gather` and `_broadcast`.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of ranks.
        on_host: Whether arrays are exchanged as NumPy arrays, whatever their library.
        communication_dtype: "bfloat16" halves the traffic of `all_reduce`: float32 arrays are rounded before they are
            sent, added in float32, and the sums are rounded again. The bits then depend on the number of ranks.
        overlaps: Whether gradients are added by a thread during the backward pass, as soon as they are known; the bits
            are the same.
    """

    rank: int
    size: int
    on_host = True
    communication_dtype = "float32"
    overlaps = False

    def all_reduce(self, arrays: Sequence[Array], *, exact: bool = False) -> list[Array]:
        """Return the sum over the ranks of each array, bit-identical on all of them.

        Each rank adds a part of all elements, in the order of `tree_sum`, and the ranks exchange their parts: as much
        traffic as a ring (Thakur et al., 2005), but an order that does not depend on the library of the transport.

        Args:
            arrays: Arrays of the same shapes and dtypes on all ranks.
            exact: Whether to send float32 as it is, whatever `communication_dtype`.
        """
        if self.size == 1:
            return list(arrays)
        sums: list[Any] = [None] * len(arrays)
        local = [to_host(array) if self.on_host else array for array in arrays]
        for bucket in buckets(local):
            for index, total in zip(bucket, self._sum([local[index] for index in bucket], exact), strict=True):
                sums[index] = _like(total, arrays[index]) if self.on_host else total
        return sums

    def _sum(self, arrays: Sequence[Any], exact: bool) -> Iterator[Any]:
        """Yield the sums of arrays of one dtype."""
        xp = array_namespace(arrays[0])
        flat = [xp.reshape(array, (-1,)) for array in arrays]
        count = sum(part.shape[0] for part in flat)
        padding = -count % self.size
        if padding:
            flat.append(xp.zeros((padding,), dtype=flat[0].dtype, device=device(flat[0])))
        is_rounded = self.communication_dtype == "bfloat16" and flat[0].dtype == xp.float32 and not exact
        pack, unpack = (to_bits, from_bits) if is_rounded else (lambda x: x, lambda x: x)
        rows = unpack(self._all_to_all(pack(xp.reshape(xp.concat(flat), (self.size, -1)))))
        part = tree_sum([rows[rank, :] for rank in range(self.size)])
        total = xp.reshape(unpack(self._all_gather(pack(part))), (-1,))
        start = 0
        for array in arrays:
            stop = start + array.size
            yield xp.reshape(total[start:stop], array.shape)
            start = stop

    def share(self, arrays: Sequence[Array | None], owners: Sequence[int]) -> list[Any]:
        """Return each array as the rank that owns it has it.

        Args:
            arrays: Arrays of the same shapes and dtypes on all ranks, or None.
            owners: Rank that owns each array.
        """
        if self.size == 1:
            return list(arrays)
        shared: list[Any] = list(arrays)
        for index, (array, owner) in enumerate(zip(arrays, owners, strict=True)):
            if array is not None:
                received = self._broadcast(to_host(array) if self.on_host else array, owner)
                if owner != self.rank:
                    shared[index] = _like(received, array) if self.on_host else received
        return shared

    def all_gather(self, value: Any) -> list[Any]:
        """Return the value of every rank, in the order of the ranks.

        Args:
            value: A value that JSON can represent.
        """
        if self.size == 1:
            return [value]
        content = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        sizes = self._all_gather_host(np.asarray([content.size], dtype=np.int64))[:, 0]
        padded = np.zeros(int(sizes.max()), dtype=np.uint8)
        padded[: content.size] = content
        rows = self._all_gather_host(padded)
        return [json.loads(row[:count].tobytes()) for row, count in zip(rows, sizes.tolist(), strict=True)]

    def _all_to_all(self, rows: Any) -> Any:
        """Send row r to rank r; return the rows received, (size, n), in the order of the ranks."""
        raise NotImplementedError

    def _all_gather(self, row: Any) -> Any:
        """Return the rows of all ranks, (size, n)."""
        raise NotImplementedError

    def _broadcast(self, array: Any, root: int) -> Any:
        """Return the array of the rank `root`, of the same shape and dtype."""
        raise NotImplementedError

    def _all_gather_host(self, row: Any) -> Any:
        """Return the rows of all ranks for a NumPy array."""
        return self._all_gather(row)

    def abort(self) -> None:
        """End all ranks at once; other ranks would wait forever for one that has failed."""
        raise NotImplementedError


class SingleProcess(Communicator):
    """The communicator of a program that is alone, which has nothing to exchange."""

    rank, size = 0, 1

    def abort(self) -> None:
        """Do nothing."""


def broadcast(communicator: Communicator, tree: Any, root: int = 0) -> Any:
    """Return a tree with the arrays of the rank `root`; see `Communicator.share`."""
    leaves, rebuild = flatten(tree)
    return rebuild(communicator.share(leaves, [root] * len(leaves)))


def buckets(arrays: Sequence[Any], max_bytes: int = _BUCKET_BYTES) -> Iterator[list[int]]:
    """Yield the indices of neighboring arrays of one dtype that have about `max_bytes` bytes together."""
    bucket: list[int] = []
    num_bytes = 0
    for index, array in enumerate(arrays):
        if bucket and (num_bytes >= max_bytes or array.dtype != arrays[bucket[0]].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(index)
        num_bytes += array.size * array.dtype.itemsize
    if bucket:
        yield bucket


def _like(host: Any, array: Array) -> Array:
    """Return a NumPy array as an array of the library, dtype and device of another one."""
    return array_namespace(array).from_host(host, dtype=array.dtype, device=device(array))


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def to_bits(x: Any) -> Any:
    """Round a contiguous float32 array to bfloat16, to the nearest even; the bits are uint16."""
    return _in_blocks(_round, x, "uint16")


def from_bits(bits: Any) -> Any:
    """Return the float32 array of contiguous bfloat16 bits."""
    return _in_blocks(_expand, bits, "float32")


def _round(x: Any) -> Any:
    xp: Any = array_namespace(x)
    bits = x.view(xp.uint32)
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    return xp.where(xp.isnan(x), _QUIET_NAN, rounded)


def _expand(bits: Any) -> Any:
    xp: Any = array_namespace(bits)
    return (xp.astype(bits, xp.uint32) << 16).view(xp.float32)


def _in_blocks(function: Any, x: Any, dtype: str) -> Any:
    xp: Any = array_namespace(x)
    out = xp.empty(x.shape, dtype=getattr(xp, dtype))
    source, target = x.reshape(-1), out.reshape(-1)
    step = _BLOCK if xp.name == "numpy" else max(1, source.size)
    for start in range(0, source.size, step):
        target[start : start + step] = function(source[start : start + step])
    return out


# --- Sums of gradients over shards and ranks during the backward pass -------------------------------------------------

_OVERLAPPED_BYTES = 2**22  # smaller than in `all_reduce`, so that the first one is complete early


class OverlappedSum:
    """Adds gradients in a thread while others are computed, bucket by bucket (Li et al., 2020, section 3.2).

    All ranks add the buckets in the same order, from the last parameters to the first: the order of the backward pass.

    Args:
        communicator: The ranks.
        parameters: The parameters, whose shapes and dtypes the gradients have.
        num_shards: Number of shards of this rank.
    """

    def __init__(self, communicator: Communicator, parameters: Sequence[Array], num_shards: int) -> None:
        self._communicator, count = communicator, len(parameters)
        self._gradients: list[list[Any]] = [[None] * num_shards for _ in range(count)]
        self._num_missing = [num_shards] * count
        last_to_first = list(reversed(range(count)))
        ordered = buckets([parameters[number] for number in last_to_first], _OVERLAPPED_BYTES)
        self._buckets = [[last_to_first[index] for index in bucket] for bucket in ordered]
        self._condition, self._is_canceled = threading.Condition(), False
        self.totals: list[Any] = [None] * count

    def add(self, shard: int, number: int, gradient: Array) -> None:
        """Add the gradient of a parameter in one shard."""
        with self._condition:
            self._gradients[number][shard] = gradient
            self._num_missing[number] -= 1
            self._condition.notify()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Add the buckets that become complete in the block, and wait for the others; `totals` are then the sums."""
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(self._run)
            try:
                yield
            except BaseException:
                with self._condition:
                    self._is_canceled = True
                    self._condition.notify()
                raise
            future.result()

    def _run(self) -> None:
        for bucket in self._buckets:
            with self._condition:
                while not self._is_canceled and any(self._num_missing[number] for number in bucket):
                    self._condition.wait()
                if self._is_canceled:
                    return
            sums = [tree_sum(self._gradients[number]) for number in bucket]
            for number, total in zip(bucket, self._communicator.all_reduce(sums), strict=True):
                self.totals[number], self._gradients[number] = total, []


# --- An optimizer whose state is divided among the ranks --------------------------------------------------------------


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
        rank = self.communicator.rank
        mine = [next(new) if owner == rank else leaf for owner, leaf in zip(owners, leaves, strict=True)]
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


# --- The communicator that a program was started with, and ranks that MPI connects (Dalcin and Fang, 2021) ------------

COMMUNICATORS = ("mpi", "nccl")
_SECONDS_FOR_RANK_0 = 2.0  # to report an error that all ranks have


def connect(name: str | None = "mpi") -> Communicator:
    """Return the communicator of the processes that a launcher has started.

    An error that a program does not catch on one of several ranks then ends all of them.

    Args:
        name: "mpi"; "nccl" for CuPy arrays on NVIDIA GPUs, one for each rank, where MPI only starts the processes; or
            None for a program that is alone.

    Raises:
        ConfigError: For another name.
        BackendError: If a package is missing.
    """
    if name is None:
        return SingleProcess()
    if name not in COMMUNICATORS:
        raise ConfigError(f"communicator is {name!r}; expected {' or '.join(map(repr, COMMUNICATORS))}")
    communicator: Communicator = MPICommunicator()
    if name == "nccl":
        with abort_on_error(communicator):
            communicator = NCCLCommunicator(communicator)

    def end_all(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        sys.__excepthook__(kind, error, trace)
        communicator.abort()

    if communicator.size > 1:
        sys.excepthook = end_all  # for uncaught errors
    return communicator


@contextlib.contextmanager
def abort_on_error(communicator: Communicator) -> Iterator[None]:
    """End all ranks if the block raises on one of them: the others would wait forever.

    The error is printed on stderr; once if all ranks have the same one. A program that is alone just raises it.
    """
    try:
        yield
    except BaseException as error:
        if communicator.size == 1:
            raise
        if communicator.rank > 0:
            time.sleep(_SECONDS_FOR_RANK_0)
        if isinstance(error, XformerError | OSError):
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            traceback.print_exception(error)
        communicator.abort()
        raise


class MPICommunicator(Communicator):
    """The processes that `mpiexec` has started.

    Arrays of other libraries than NumPy pass through the memory of the host. All sums are computed here: MPI only
    moves bytes, so its version and its choice of algorithms do not change a bit.

    Raises:
        BackendError: If mpi4py or an MPI library is missing.
    """

    def __init__(self) -> None:
        try:
            self._mpi = importlib.import_module("mpi4py.MPI")
        except (ImportError, RuntimeError) as error:  # mpi4py raises a RuntimeError if it finds no MPI library
            hint = how_to_install("mpi4py")
            problem = f"mpi4py cannot be loaded ({error})"
            raise BackendError(f"{problem}; {hint}, and an MPI library: pip install mpich") from error
        self._comm = self._mpi.COMM_WORLD.Dup()
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def _all_to_all(self, rows: Any) -> Any:
        rows = np.ascontiguousarray(rows)
        received = np.empty_like(rows)
        self._comm.Alltoall(self._bytes(rows), self._bytes(received))
        return received

    def _all_gather(self, row: Any) -> Any:
        row = np.ascontiguousarray(row)
        received = np.empty((self.size, *row.shape), dtype=row.dtype)
        self._comm.Allgather(self._bytes(row), self._bytes(received))
        return received

    def _broadcast(self, array: Any, root: int) -> Any:
        array = np.array(array, order="C")  # a copy, which the other ranks write to
        self._comm.Bcast(self._bytes(array), root=root)
        return array

    def _bytes(self, array: Any) -> list[Any]:
        return [array.reshape(-1).view(np.uint8), self._mpi.BYTE]

    def local_rank(self) -> int:
        """Return the number of this rank among those of its host."""
        return int(self._comm.Split_type(self._mpi.COMM_TYPE_SHARED).Get_rank())

    def abort(self) -> None:
        """End all ranks with exit code 1."""
        self._comm.Abort(1)


# --- Ranks with one NVIDIA GPU each, through NCCL and CuPy; MPI starts them -------------------------------------------


class NCCLCommunicator(Communicator):
    """Exchanges CuPy arrays between GPUs without a copy to the host.

    The ranks of a host take its GPUs in order. NCCL moves bytes and adds nothing, so its choice of algorithms does not
    change a bit. Values that are no arrays pass through MPI.

    Args:
        mpi: The ranks.

    Raises:
        BackendError: If CuPy has no NCCL, or a host has more ranks than GPUs.
    """

    on_host = False

    def __init__(self, mpi: Any) -> None:
        self._mpi, self.rank, self.size = mpi, mpi.rank, mpi.size
        resolve("cupy")  # raises an error if it is missing
        self._cupy = importlib.import_module("cupy")
        try:
            self._nccl = importlib.import_module("cupy.cuda.nccl")
            unique_id = self._nccl.get_unique_id
        except (ImportError, AttributeError) as error:
            raise BackendError("this build of CuPy has no NCCL; run: pip install nvidia-nccl-cu13") from error
        self._type = self._nccl.NCCL_INT8
        local_rank, runtime = mpi.local_rank(), self._cupy.cuda.runtime
        count = runtime.getDeviceCount()
        if local_rank >= count:
            raise BackendError(f"{os.uname().nodename} has {count} GPUs; expected one for each of its ranks")
        runtime.setDevice(local_rank)
        name = np.zeros(128, dtype=np.int8)
        if self.rank == 0:
            name[:] = unique_id()
        shared = tuple(int(value) for value in mpi._broadcast(name, 0))
        self._communicator = self._nccl.NcclCommunicator(self.size, shared, self.rank)

    def _all_to_all(self, rows: Any) -> Any:
        rows = self._cupy.ascontiguousarray(rows)
        received = self._cupy.empty(rows.shape, rows.dtype)
        self._nccl.groupStart()
        for peer in range(self.size):
            self._communicator.send(rows[peer].data.ptr, rows[peer].nbytes, self._type, peer, self._stream())
            self._communicator.recv(received[peer].data.ptr, rows[peer].nbytes, self._type, peer, self._stream())
        self._nccl.groupEnd()
        return received

    def _all_gather(self, row: Any) -> Any:
        row = self._cupy.ascontiguousarray(row)
        received = self._cupy.empty((self.size, *row.shape), row.dtype)
        self._communicator.allGather(row.data.ptr, received.data.ptr, row.nbytes, self._type, self._stream())
        return received

    def _broadcast(self, array: Any, root: int) -> Any:
        source = self._cupy.ascontiguousarray(array)
        received = self._cupy.empty(source.shape, source.dtype)
        pointers = source.data.ptr, received.data.ptr
        self._communicator.broadcast(*pointers, source.nbytes, self._type, root, self._stream())
        return received

    def _all_gather_host(self, row: Any) -> Any:
        return self._mpi._all_gather(row)

    def _stream(self) -> int:
        return int(self._cupy.cuda.get_current_stream().ptr)

    def abort(self) -> None:
        """End all ranks with exit code 1."""
        self._communicator.abort()
        self._mpi.abort()
