"""Keys and values of earlier tokens, and all else that a model keeps between the steps of decoding."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xformer import native
from xformer.backends import Array, array_namespace, assign, device
from xformer.errors import ConfigError, JitError, ShapeError
from xformer.layers.embedding import InputEmbedding
from xformer.layers.positions import PositionTerms, RelativePositions, Rotation, position_terms
from xformer.ops import embedding
from xformer.ops.attention import cache_slots, write_slots
from xformer.ops.weights import contiguous
from xformer.tree import check_array, wrong_array

_TO_STATIC = "use model.to_static(cache, max_length)"
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
        slots: Function that returns where new tokens go in arrays of (rows * heads * capacity) vectors, integers
            (rows * heads * new tokens,). A `DecodingCache` of fixed shape sets it and `index` in each step.
        index: Position of the next token of each row, integers (rows,).
    """

    slots: Callable[[], Array] | None = None
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
        copied = KVCache(*(contiguous(with_size(x, max_length, copy=True)) for x in (self.key, self.value)))
        copied.is_own = array_namespace(self.key).is_writable
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
            self.is_own = array_namespace(key).is_writable
        self._length += length
        return self._valid(self._key), self._valid(self._value)

    def reorder(self, rows: Array) -> None:
        """Replace row i by the former row rows[i]; integers, in any order, repeats allowed."""
        if self._key is not None and self._value is not None:
            xp = array_namespace(self._key)
            self._key, self._value = (xp.take(x, rows, axis=0) for x in (self._key, self._value))
            self.is_own = array_namespace(self._key).is_writable

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
            self._length, self.is_own = size, array_namespace(self._key).is_writable

    def move(self, targets: Array, sources: Array) -> None:
        """Copy the rows `sources` to the rows `targets` in place. Requires `is_own`."""
        for x in (self._key, self._value):
            used: Any = x[:, :, : self._length, :]  # type: ignore[index]
            if native.can_copy(used, used.dtype):
                rows = np.empty((sources.shape[0], *used.shape[1:]), used.dtype)
                native.call("take", (used, sources, rows), 0)
                native.call("put", (rows, targets, used), 0)
            else:
                used[targets, ...] = used[sources, ...]

    def _valid(self, x: Any) -> Any:
        return x if x is None or x.shape[2] == self._length else x[:, :, : self._length, :]

    def _write(self, old: Any, new: Array) -> Array:
        """Return the array with new tokens in the slots, in place if the library allows it."""
        xp, rows, length = array_namespace(old, new), old.shape[0], old.shape[2]
        if array_namespace(old).is_writable:
            write_slots(old, new, self.slots())  # type: ignore[misc]
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
        expected = f"({rows}, {heads}, new tokens, {features}), as the cache has"
        raise wrong_array(new, "new keys or values have", expected)
    if not (array_namespace(old).is_writable and old.dtype == new.dtype):
        return xp.concat([old[:, :, :length, :], new], axis=2)
    if end > old.shape[2]:
        rows, heads, _, features = old.shape
        capacity = max(_MIN_CAPACITY, 2 * end)
        grown = xp.empty((rows, heads, capacity, features), dtype=old.dtype, device=device(old))
        grown[:, :, :length, :] = old[:, :, :length, :]
        old = grown
    old[:, :, length:end, :] = new
    return old


@dataclass
class LayerCache:
    """Caches of one decoder layer.

    Attributes:
        self_attention: Keys and values of the target tokens so far, one row per hypothesis.
        cross_attention: Keys and values of the memory, one row per input.
    """

    self_attention: KVCache
    cross_attention: KVCache


@dataclass
class Memory:
    """Encoded source of an encoder-decoder, one row per input.

    Attributes:
        states: Output of the encoder (inputs, keys, d_model).
        ids: Source ids (inputs, keys).
        mask: Boolean mask of the keys (inputs, 1, 1, keys).
        lengths: Requested output lengths in tokens, eos included, (inputs,).
        copy_key: Projected keys of the copy head (inputs, keys, d_model).
    """

    states: Array
    ids: Array | None
    mask: Array | None
    lengths: Array | None
    copy_key: Array | None = None

    def reorder(self, inputs: Array) -> None:
        """Replace input i by the former input inputs[i]."""
        for name, x in vars(self).items():
            setattr(self, name, None if x is None else array_namespace(x).take(x, inputs, axis=0))

    def put(self, inputs: Sequence[int], other: Memory) -> None:
        """Replace inputs by those of another memory; the shorter sources are padded."""
        xp, keys = array_namespace(self.states), max(x.states.shape[1] for x in (self, other))
        for each in (self, other):
            if each.mask is None:
                shape = each.states.shape[0], 1, 1, each.states.shape[1]
                each.mask = xp.ones(shape, dtype=xp.bool, device=device(each.states))
            each.resize(keys)
        for name, x in vars(self).items():
            setattr(self, name, None if x is None else put_rows(x, inputs, getattr(other, name)))

    def resize(self, keys: int) -> None:
        """Cut or pad the sources to a number of keys."""
        for name, axis in (("states", 1), ("ids", 1), ("mask", 3), ("copy_key", 1)):
            x = getattr(self, name)
            setattr(self, name, None if x is None else with_size(x, keys, axis))

    def copy(self) -> Memory:
        """Return a copy that shares no arrays with this memory."""
        arrays: Any = (None if x is None else array_namespace(x).asarray(x, copy=True) for x in vars(self).values())
        return Memory(*arrays)


class DecodingCache:
    """Keys and values of all layers, and the memory of an encoder-decoder.

    `Transformer.prefill` and `LanguageModel.init_cache` make it; `decode_step` fills it. Rows are hypotheses, grouped
    by input, the same number for each. It grows with its tokens, and all rows have the same number.

    `to_static` makes a copy of fixed shape, for steps of one or a few tokens, whose rows may have different lengths;
    smaller lengths drop the last tokens. Everything that changes between steps is in arrays then, updated in place if
    the backend allows it: a step can be traced by `jit`, or run as a CUDA graph.

    Args:
        num_layers: Number of decoder layers.
        like: Array (..., d_model) of the library, dtype and device of the model.
        memory: Encoded source.

    Attributes:
        length: Number of tokens per row; of the longest one if they differ.
        lengths: Number of tokens of each row, which is the position of its next token, integers (rows,). A cache that
            grows has them only if they differ: shorter rows end with padding then, and only `to_static` can go on.
        capacity: Number of tokens of a cache of fixed shape; None if it grows.
    """

    def __init__(self, num_layers: int, *, like: Array, memory: Memory | None = None) -> None:
        self.layers = [LayerCache(KVCache(), KVCache()) for _ in range(num_layers)]
        self.memory, self.length, self._like = memory, 0, like
        self.lengths: Any = None
        self.capacity: int | None = None
        self._position_embeddings: Array | None = None  # tables of all positions, of a cache of fixed shape
        self._position_terms: list[PositionTerms] = []
        self._range: Any = None

    def with_capacity(
        self, max_length: int, layer: InputEmbedding, positions: Sequence[RelativePositions | None]
    ) -> DecodingCache:
        """Return a copy of fixed shape.

        Args:
            max_length: Capacity in tokens.
            layer: Input embedding of the decoder.
            positions: Relative positions of the decoder's layers.

        Raises:
            ShapeError: If the cache is empty.
        """
        like = self._like
        xp, like_device = array_namespace(like), device(like)
        # Its arrays may be overwritten.
        fixed = DecodingCache(0, like=like, memory=None if self.memory is None else self.memory.copy())
        fixed.length, fixed.capacity = self.length, max_length
        fixed.layers = [
            LayerCache(each.self_attention.with_capacity(max_length), each.cross_attention) for each in self.layers
        ]
        key: Any = fixed.layers[0].self_attention.key
        lengths = [self.length] * key.shape[0] if self.lengths is None else self.lengths
        fixed.lengths = xp.asarray(lengths, dtype=xp.int64, device=like_device, copy=True)
        fixed._position_embeddings = layer.position_embeddings(max_length, like)
        fixed._range = xp.arange(max_length, dtype=xp.int64, device=like_device)
        for each in positions:
            rotation, bias = position_terms(each, 1, max_length, like)
            if rotation is not None:  # of all positions, each the last one of its text
                rotation = position_terms(each, max_length, max_length, like, fixed._range[:, None] + 1).rotation
                rotation = Rotation(*(xp.asarray(angle, copy=True) for angle in rotation or ()))  # others use the table
            fixed._position_terms.append(PositionTerms(rotation, bias))
        return fixed

    # --- One step of a model ------------------------------------------------------------------------------------------

    def mask(self, num_tokens: int) -> Array | None:
        """Return a boolean mask of the tokens up to each new one; None for all.

        Of fixed shape: (rows, 1, new tokens, capacity).
        """
        if self.capacity is None and self.lengths is None:
            return None
        if self.capacity is None:
            raise ConfigError(f"rows of different lengths take no further tokens; {_TO_STATIC}")
        if self.length + num_tokens > self.capacity:
            raise ConfigError(f"the cache is full: it holds {self.capacity} tokens; {_TO_STATIC}")
        key: Any = self.layers[0].self_attention.key
        slots = functools.cache(functools.partial(cache_slots, self.lengths, key, num_tokens))
        for layer in self.layers:
            layer.self_attention.index, layer.self_attention.slots = self.lengths, slots
        return (self._range <= self._positions(num_tokens)[:, :, None])[:, None, :, :]

    def embed(self, layer: InputEmbedding, x: Array) -> Array:
        """Apply an `InputEmbedding` to the vectors of new tokens, (rows, new tokens, d_model)."""
        table = self._position_embeddings
        if table is None:  # it grows, or nothing is added to the vectors
            return layer(x, start=self.length)
        return layer(x, position_embeddings=embedding(table, self._rows_of(table.shape[0], x.shape[1])))

    def position_terms(
        self, positions: Sequence[RelativePositions | None], num_tokens: int, like: Array, lengths: Array | None = None
    ) -> list[PositionTerms]:
        """Return the terms of each of the model's relative positions for new tokens; `lengths` if rows differ."""
        if self.capacity is None:
            sizes = None if lengths is None else lengths[:, None, None]
            return [position_terms(each, num_tokens, self.length + num_tokens, like, sizes) for each in positions]
        xp, size = array_namespace(like), self.capacity
        has_any, terms = any(x is not None for term in self._position_terms for x in term), list[PositionTerms]()
        rows: Any = self._rows_of(size, num_tokens) if has_any else None
        for rotation, bias in self._position_terms:
            if rotation is not None:
                angles = (xp.take(angle, xp.reshape(rows, (-1,)), axis=0) for angle in rotation)
                rotation = Rotation(*(xp.reshape(angle, (*rows.shape, angle.shape[1])) for angle in angles))
            if bias is not None:
                # The table is that of the last position; others see its keys at the same distances.
                keys = xp.clip(self._range + (size - 1 - rows)[:, :, None], max=size - 1)
                bias = xp.take(bias[:, 0, :], xp.reshape(keys, (-1,)), axis=1)
                bias = xp.permute_dims(xp.reshape(bias, (bias.shape[0], *keys.shape)), (1, 0, 2, 3))
            terms.append(PositionTerms(rotation, bias))
        return terms

    def positions(self, num_tokens: int, like: Array) -> Array:
        """Return the positions of new tokens, (num_tokens,) or (rows, num_tokens), in the integer dtype of `like`."""
        xp, length = array_namespace(like), self.length
        if self.capacity is None:
            return xp.arange(length, length + num_tokens, dtype=like.dtype, device=device(like))
        return xp.astype(self._positions(num_tokens), like.dtype, copy=False)

    def advance(self, num_tokens: int, lengths: Array | None = None) -> None:
        """Count new tokens, once all layers hold them; `lengths` of the rows of a cache that grows if they differ."""
        self.length += num_tokens
        if self.capacity is None:
            self.lengths = lengths
        elif array_namespace(self.lengths).is_trace:
            self.lengths = assign(self.lengths, self.lengths + num_tokens)
        else:
            self.lengths += num_tokens  # by one launch on a GPU

    def _positions(self, num_tokens: int) -> Array:
        first = self.lengths[:, None]
        return first if num_tokens == 1 else first + self._range[:num_tokens]

    def _rows_of(self, count: int, num_tokens: int) -> Array:
        """Return the positions of new tokens within a table; rows that are not used may be at any position."""
        return array_namespace(self.lengths).clip(self._positions(num_tokens), max=count - 1)

    # --- Rows that move -----------------------------------------------------------------------------------------------

    def reorder(self, rows: Sequence[int], inputs: Sequence[int] | None = None) -> None:
        """Replace row i by the former row rows[i].

        Args:
            rows: Indices in any order, repeats allowed.
            inputs: Inputs to keep; None keeps all. The memory has one row per input and is never repeated.
        """
        caches = [layer.self_attention for layer in self.layers]  # all have the same length and ownership
        key = caches[0].key if caches and caches[0].is_own else None
        if key is not None and len(rows) == key.shape[0]:
            moved = [row for row, parent in enumerate(rows) if row != parent]
            targets, sources = self._indices(moved), self._indices([rows[row] for row in moved])
            for cache in caches:
                cache.move(targets, sources)
        else:
            indices = self._indices(rows)
            for cache in caches:
                cache.reorder(indices)
        if self.lengths is not None:
            lengths = array_namespace(self.lengths).take(self.lengths, self._indices(rows), axis=0)
            is_same_shape = lengths.shape == self.lengths.shape
            self.lengths = assign(self.lengths, lengths) if is_same_shape else lengths
        if inputs is not None:
            indices = self._indices(inputs)
            for layer in self.layers:
                layer.cross_attention.reorder(indices)
            if self.memory is not None:
                self.memory.reorder(indices)

    def put(self, rows: Sequence[int], inputs: Sequence[int], other: DecodingCache) -> None:
        """Replace rows and inputs of a cache of fixed shape by those of a cache of the same model."""
        xp = array_namespace(self.lengths)
        lengths = [other.length] * len(rows) if other.lengths is None else other.lengths
        lengths = xp.asarray(lengths, dtype=self.lengths.dtype, device=device(self.lengths))
        self.lengths = put_rows(self.lengths, rows, lengths)
        for layer, new in zip(self.layers, other.layers, strict=True):
            layer.self_attention.put(rows, new.self_attention, self.capacity)
            layer.cross_attention.put(inputs, new.cross_attention)
        if self.memory is not None and other.memory is not None:
            self.memory.put(inputs, other.memory)

    def cut_memory(self, size: int) -> None:
        """Keep the first `size` keys of the sources."""
        if self.memory is not None:
            self.memory.resize(size)
        for layer in self.layers:
            key, value = layer.cross_attention.key, layer.cross_attention.value
            layer.cross_attention = KVCache(with_size(key, size), with_size(value, size))

    def _indices(self, numbers: Sequence[int]) -> Array:
        return array_namespace(self._like).from_host(list(numbers), dtype="int64", device=device(self._like))

    # --- Programs -----------------------------------------------------------------------------------------------------

    def arrays(self) -> list[Array | None]:
        """Return the arrays that a step reads or writes; another cache of these shapes can be copied into them.

        Raises:
            JitError: If the cache grows, since a program has fixed shapes.
        """
        if self.capacity is None:
            raise JitError(f"the cache grows with its tokens; {_TO_STATIC}")
        found = [self.lengths, self._position_embeddings]
        found += [] if self.memory is None else vars(self.memory).values()
        for layer in self.layers:
            for cache in (layer.self_attention, layer.cross_attention):
                found += cache.key, cache.value
        for rotation, bias in self._position_terms:
            found += *(rotation or (None, None)), bias
        return found

    def alias(self) -> DecodingCache:
        """Return a cache with the same arrays, which may be replaced without changing this cache."""
        alias = copy.copy(self)
        alias.memory = copy.copy(self.memory)
        alias.layers = [
            LayerCache(copy.copy(layer.self_attention), copy.copy(layer.cross_attention)) for layer in self.layers
        ]
        return alias

    def without(self, arrays: Sequence[Array | None]) -> DecodingCache:
        """Return a cache with copies of those of its arrays that are among others."""
        others = set(map(id, arrays))
        return copy.deepcopy(self, {id(x): x for x in (self._like, *self.arrays()) if id(x) not in others})


def last_tokens(x: Array, lengths: Array | None) -> Array:
    """Return the vector of the last token of each row, (rows, 1, features), of x (rows, tokens, features).

    Args:
        x: Vectors.
        lengths: Number of tokens of each row if they differ, integers (rows,).
    """
    if lengths is None:
        return x if x.shape[1] == 1 else x[:, -1:, :]
    xp, (rows, num_tokens, size) = array_namespace(x), x.shape
    starts = xp.arange(rows, dtype=lengths.dtype, device=device(x)) * num_tokens
    last = xp.take(xp.reshape(x, (rows * num_tokens, size)), starts + lengths - 1, axis=0)
    return xp.reshape(last, (rows, 1, size))


def with_size(x: Any, size: int, axis: int = 2, fill: int = 0, *, copy: bool = False) -> Any:
    """Return an array cut or padded to a size; one that has this size itself, unless a copy is asked for."""
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
    if not array_namespace(x).is_writable:
        indices = list(range(x.shape[0]))
        for index, row in enumerate(rows):
            indices[row] = x.shape[0] + index
        x = xp.concat([x, values], axis=0)
    at = xp.from_host(indices, dtype="int64", device=device(x))
    if not array_namespace(x).is_writable:
        return xp.take(x, at, axis=0)
    x[at, ...] = values
    return x
