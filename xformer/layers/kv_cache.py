"""Keys and values of earlier tokens, so that each decoding step computes those of the new token only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xformer import native
from xformer.backends import Array, array_namespace, device, from_host, is_writable
from xformer.errors import ShapeError
from xformer.tree import check_array

_MIN_CAPACITY = 16  # in tokens, of a cache that grows


class KVCache:
    """Keys and values of one attention layer, each (rows, heads, tokens, head_dim), or None while empty.

    New tokens follow the others. If the backend writes in place, the arrays have spare capacity, which doubles when it
    is used up, so that appending a token copies no others. Arrays passed to a cache are never written. Do not copy a
    cache: the copies would share their capacity.

    With `slots`, the arrays keep their shape: new tokens are written there, and all entries count, also those beyond
    the position of a row, which are undefined; mask them. A decoding step then has the same shapes every time, and can
    be traced by `jit`, or run as a CUDA graph.

    Args:
        key: Keys to start with.
        value: Values to start with.

    Attributes:
        is_own: True if the cache alone references its arrays, so that they can be written in place.
        slots: Where new tokens go in arrays of (rows * heads * capacity) vectors, integers
            (rows * heads * new tokens,). A `DecodingCache` of fixed shape sets it and `index` in each step.
        index: Position of the next token of each row, integers (rows,).
    """

    slots: Array | None = None
    index: Array | None = None

    def __init__(self, key: Array | None = None, value: Array | None = None) -> None:
        self._key, self._value = key, value
        self._length = 0 if key is None else key.shape[2]
        self.is_own = False

    @property
    def key(self) -> Array | None:
        """Keys of the tokens so far."""
        return self._valid(self._key)

    @property
    def value(self) -> Array | None:
        """Values of the tokens so far."""
        return self._valid(self._value)

    def with_capacity(self, max_length: int) -> KVCache:
        """Return a copy of `max_length` tokens, for slots.

        Raises:
            ShapeError: If the cache is empty.
        """
        if self.key is None or self.value is None:
            raise ShapeError("the cache is empty; expected at least one decoding step before to_static()")
        copied = KVCache(*(with_size(x, max_length, copy=True) for x in (self.key, self.value)))
        copied.is_own = is_writable(self.key)
        return copied

    def append(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Append the keys and values of new tokens.

        Args:
            key: Array of shape (rows, heads, new tokens, head_dim).
            value: Array of the same shape.

        Returns:
            Keys and values of all tokens, with `slots` the whole arrays.
        """
        if self.slots is not None:
            self._key, self._value = self._write(self._key, key), self._write(self._value, value)
            return self._key, self._value
        rows, heads, length, _ = check_array(key, "key", "rows", "heads", "new tokens", "head_dim")
        check_array(value, "value", rows, heads, length, "head_dim")
        if self._key is None or self._value is None:
            self._key, self._value = key, value
        else:
            self._key = _concat_in_place(self._key, self._length, key)
            self._value = _concat_in_place(self._value, self._length, value)
            self.is_own = is_writable(key)
        self._length += length
        return self._valid(self._key), self._valid(self._value)

    def reorder(self, rows: Array) -> None:
        """Replace row i by the former row rows[i]; integers, in any order, repeats allowed."""
        if self._key is not None and self._value is not None:
            xp = array_namespace(self._key)
            self._key, self._value = (xp.take(x, rows, axis=0) for x in (self._key, self._value))
            self.is_own = is_writable(self._key)

    def put(self, rows: Sequence[int], other: KVCache, size: int | None = None) -> None:
        """Replace rows by those of another cache.

        Args:
            rows: Rows to replace.
            other: Cache with the new rows.
            size: Number of tokens that both are cut or padded to; longer rows may have ended. Default: the larger one.
        """
        pairs: Any = (self.key, other.key), (self.value, other.value)
        if self.key is not None:
            size = size or max(x.shape[2] for x in pairs[0])
            self._key, self._value = (put_rows(with_size(x, size), rows, with_size(y, size)) for x, y in pairs)
            self._length, self.is_own = size, is_writable(self._key)

    def move(self, targets: Array, sources: Array) -> None:
        """Copy the rows `sources` to the rows `targets` in place. Requires `is_own`."""
        for x in (self._key, self._value):
            used: Any = x[:, :, : self._length, :]  # type: ignore[index]
            if native.can_copy(used, used.dtype):
                rows = np.empty((len(sources), *used.shape[1:]), used.dtype)
                native.call("take", (used, sources, rows), 0)
                native.call("put", (rows, targets, used), 0)
            else:
                used[targets, ...] = used[sources, ...]

    def _valid(self, x: Any) -> Any:
        return x if x is None or x.shape[2] == self._length else x[:, :, : self._length, :]

    def _write(self, old: Any, new: Array) -> Array:
        """Return the array with new tokens in the slots, in place if the library allows it."""
        xp, (rows, heads, length, features) = array_namespace(old, new), old.shape
        if is_writable(old):
            vectors = xp.reshape(old, (rows * heads * length, features))
            vectors[self.slots, :] = xp.reshape(new, (rows * heads * new.shape[2], features))
            return old
        index: Any = self.index
        columns = xp.arange(length, dtype=index.dtype, device=device(old))
        for token in range(new.shape[2]):
            is_new = columns == xp.reshape(index, (rows, 1)) + token
            old = xp.where(is_new[:, None, :, None], new[:, :, token : token + 1, :], old)
        return old


def _concat_in_place(old: Array, length: int, new: Array) -> Array:
    """Write new tokens after the first `length` ones of `old`, if possible in place."""
    xp, end = array_namespace(old, new), length + new.shape[2]
    if old[:, :, :0, :].shape != new[:, :, :0, :].shape:
        rows, heads, _, features = old.shape
        raise ShapeError(
            f"new keys or values have shape {tuple(new.shape)}; expected ({rows}, {heads}, new tokens, {features}), as "
            "the cache has"
        )
    if not (is_writable(old) and old.dtype == new.dtype):
        return xp.concat([old[:, :, :length, :], new], axis=2)
    if end > old.shape[2]:
        rows, heads, _, features = old.shape
        capacity = max(_MIN_CAPACITY, 2 * end)
        grown = xp.empty((rows, heads, capacity, features), dtype=old.dtype, device=device(old))
        grown[:, :, :length, :] = old[:, :, :length, :]
        old = grown
    old[:, :, length:end, :] = new
    return old


def with_size(x: Any, size: int, axis: int = 2, fill: int = 0, *, copy: bool = False) -> Any:
    """Return an array that is cut or padded to a size; one that has it only as a copy if that is asked for."""
    xp, shape = array_namespace(x), list(x.shape)
    if size == shape[axis] and not copy:
        return x
    if size <= shape[axis]:
        return xp.asarray(x[(*[slice(None)] * axis, slice(size), ...)], copy=True)
    shape[axis] = size - shape[axis]
    return xp.concat([x, xp.full(tuple(shape), fill, dtype=x.dtype, device=device(x))], axis=axis)


def put_rows(x: Any, rows: Sequence[int], values: Array) -> Any:
    """Return x with other rows, in place if the library allows it."""
    xp, indices = array_namespace(x), list(rows)
    if not is_writable(x):
        indices = list(range(x.shape[0]))
        for index, row in enumerate(rows):
            indices[row] = x.shape[0] + index
        x = xp.concat([x, values], axis=0)
    at = from_host(xp, indices, dtype="int64", device=device(x))
    if not is_writable(x):
        return xp.take(x, at, axis=0)
    x[at, ...] = values
    return x


@dataclass
class LayerCache:
    """Caches of one decoder layer.

    Attributes:
        self_attention: Keys and values of the target tokens so far, one row per hypothesis.
        cross_attention: Keys and values of the memory, one row per sentence.
    """

    self_attention: KVCache
    cross_attention: KVCache
