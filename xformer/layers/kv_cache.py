"""Keys and values that decoding keeps, so that each step computes only the new token's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from xformer.backends import Array, array_namespace, device, is_writable
from xformer.errors import ShapeError

_ROOM = 16  # tokens, at least, that a store which has to grow has room for beyond what it needs


class KVCache:
    """Keys and values of one attention layer, each (rows, heads, tokens, head_dim), or None before the first.

    Where arrays can be written, there is room for more tokens than there are, so that a new one copies no others. What
    a store is given is never written; a copy of a store would share the room, so make none.

    is_own: whether the arrays are no one else's, and can be written.
    """

    def __init__(self, key: Array | None = None, value: Array | None = None) -> None:
        self._key, self._value = key, value
        self._length = 0 if key is None else int(key.shape[2])
        self.is_own = False

    @property
    def key(self) -> Array | None:
        """The keys so far."""
        return self._so_far(self._key)

    @property
    def value(self) -> Array | None:
        """The values so far."""
        return self._so_far(self._value)

    def append(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Add those of new tokens; return all of them."""
        if self._key is None or self._value is None:
            self._key, self._value = key, value
        else:
            self._key, self._value = _joined(self._key, self._length, key), _joined(self._value, self._length, value)
            self.is_own = is_writable(key)
        self._length += int(key.shape[2])
        return self._so_far(self._key), self._so_far(self._value)

    def reorder(self, rows: Array) -> None:
        """Let row i from now on be what row rows[i] was (integers, in any order, repeats allowed)."""
        if self._key is not None and self._value is not None:
            xp = array_namespace(self._key)
            self._key, self._value = (xp.take(x, rows, axis=0) for x in (self._key, self._value))
            self.is_own = is_writable(self._key)

    def move(self, targets: Array, sources: Array) -> None:
        """Let rows `targets` be what rows `sources` were; the others stay, uncopied. Only where `is_own`."""
        for x in (self._key, self._value):
            x[targets, :, : self._length, :] = x[sources, :, : self._length, :]  # type: ignore[index]

    def _so_far(self, kept: Any) -> Any:
        return kept if kept is None or kept.shape[2] == self._length else kept[:, :, : self._length, :]


def _joined(kept: Array, length: int, new: Array) -> Array:
    """New tokens after the first so many of those that are kept."""
    xp, end = array_namespace(kept, new), length + int(new.shape[2])
    fits = (
        kept.dtype == new.dtype and kept[:, :, :0, :].shape == new[:, :, :0, :].shape
    )  # else concat says what is wrong
    if not (is_writable(kept) and fits):
        return xp.concat([kept[:, :, :length, :], new], axis=2)
    if end > kept.shape[2]:
        rows, heads, _, features = kept.shape
        roomy = xp.empty((rows, heads, end + max(_ROOM, end // 2), features), dtype=kept.dtype, device=device(kept))
        roomy[:, :, :length, :] = kept[:, :, :length, :]
        kept = roomy
    kept[:, :, length:end, :] = new
    return kept


class StaticKVCache(KVCache):
    """A store whose arrays never change their shape: new tokens go where an array says.

    store: what there is so far. max_length: how many tokens there may be. place: the number of the next one, (1,)
    integers; its owner moves it on. Beyond it, what is kept means nothing.
    """

    def __init__(self, store: KVCache, max_length: int, place: Array) -> None:
        if store.key is None or store.value is None:
            raise ShapeError("the store is empty; fill it first with the tokens that the output begins with")
        super().__init__(_with_capacity(store.key, max_length), _with_capacity(store.value, max_length))
        self.place = place
        self._here = array_namespace(place).arange(max_length, device=device(place))

    def append(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Put those of one new token in its place; return all that there is room for."""
        self._key, self._value = self._put(self._key, key), self._put(self._value, value)
        return self._key, self._value

    def _put(self, kept: Any, new: Array) -> Array:
        if is_writable(kept):
            kept[:, :, self.place, :] = new
            return kept
        xp = array_namespace(kept, new)
        return xp.where(xp.reshape(self._here == self.place, (1, 1, kept.shape[2], 1)), new, kept)


def _with_capacity(kept: Array, max_length: int) -> Array:
    """A copy with zeros up to so many tokens."""
    xp, (rows, heads, length, features) = array_namespace(kept), kept.shape
    rest = xp.zeros((rows, heads, max_length - length, features), dtype=kept.dtype, device=device(kept))
    return xp.concat([kept, rest], axis=2)


@dataclass
class LayerCache:
    """What one decoder layer keeps: the target so far grows, one row a hypothesis; the memory stays, one a sentence."""

    self_attention: KVCache
    cross_attention: KVCache
