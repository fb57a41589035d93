"""The exchange of arrays between ranks, and sums whose bits do not depend on the number of ranks."""

from __future__ import annotations

import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from xformer.backends import Array, array_namespace, device, to_host
from xformer.tree import flatten

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


class Communicator(ABC):
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

    @abstractmethod
    def _all_to_all(self, rows: Any) -> Any:
        """Send row r to rank r; return the rows received, (size, n), in the order of the ranks."""

    @abstractmethod
    def _all_gather(self, row: Any) -> Any:
        """Return the rows of all ranks, (size, n)."""

    @abstractmethod
    def _broadcast(self, array: Any, root: int) -> Any:
        """Return the array of the rank `root`, of the same shape and dtype."""

    def _all_gather_host(self, row: Any) -> Any:
        """Return the rows of all ranks for a NumPy array."""
        return self._all_gather(row)

    @abstractmethod
    def abort(self) -> None:
        """End all ranks at once; other ranks would wait forever for one that has failed."""


class SingleProcess(Communicator):
    """The communicator of a program that is alone."""

    rank, size = 0, 1

    def _all_to_all(self, rows: Any) -> Any:
        return rows

    def _all_gather(self, row: Any) -> Any:
        return row[None, :]

    def _broadcast(self, array: Any, root: int) -> Any:
        return array

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


# --- bfloat16 -------------------------------------------------------------------------------------------------------


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
