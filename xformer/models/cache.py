"""State that a model keeps between the steps of decoding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xformer.backends import Array, array_namespace, assign, device, from_host
from xformer.errors import ConfigError, JitError
from xformer.layers import InputEmbedding, KVCache, LayerCache
from xformer.layers.kv_cache import put_rows, with_size
from xformer.layers.positions import PositionTerms, RelativePositions, Rotation, position_terms
from xformer.ops import embedding
from xformer.tree import check_array


@dataclass
class Memory:
    """Encoded source of an encoder-decoder, one row per sentence.

    Attributes:
        states: Output of the encoder (sentences, keys, d_model).
        ids: Source ids (sentences, keys).
        mask: Boolean mask of the keys (sentences, 1, 1, keys).
        lengths: Requested output lengths in tokens, eos included, (sentences,).
        copy_key: Projected keys of the copy head (sentences, keys, d_model).
    """

    states: Array
    ids: Array | None
    mask: Array | None
    lengths: Array | None
    copy_key: Array | None = None

    def reorder(self, sentences: Array) -> None:
        """Replace sentence i by the former sentence sentences[i]."""
        for name, x in vars(self).items():
            setattr(self, name, None if x is None else array_namespace(x).take(x, sentences, axis=0))

    def put(self, sentences: Sequence[int], other: Memory) -> None:
        """Replace sentences by those of another memory; the shorter sources are padded."""
        xp, keys = array_namespace(self.states), max(x.states.shape[1] for x in (self, other))
        for each in (self, other):
            if each.mask is None:
                shape = each.states.shape[0], 1, 1, each.states.shape[1]
                each.mask = xp.ones(shape, dtype=xp.bool, device=device(each.states))
            each.resize(keys)
        for name, x in vars(self).items():
            setattr(self, name, None if x is None else put_rows(x, sentences, getattr(other, name)))

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
    by sentence, the same number for each. It grows with its tokens, and all rows have the same number.

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
            raise ConfigError(
                "rows of different lengths take no further tokens; use model.to_static(cache, max_length)"
            )
        if self.length + num_tokens > self.capacity:
            raise ConfigError(
                f"the cache is full: it holds {self.capacity} tokens; use model.to_static(cache, max_length)"
            )
        xp, key = array_namespace(self.lengths), self.layers[0].self_attention.key
        # Where the layers write the keys and values of the new tokens, in an array of (rows * heads * tokens) vectors.
        rows, heads, _, _ = key.shape  # type: ignore[union-attr]
        starts = xp.arange(rows * heads, dtype=xp.int64, device=device(self.lengths)) * self.capacity
        slots = xp.reshape(starts, (rows, heads, 1)) + self._rows_of(self.capacity, num_tokens)[:, None, :]
        slots = xp.reshape(slots, (rows * heads * num_tokens,))
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
        rows, terms = self._rows_of(size, num_tokens), []
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
        else:
            ends = array_namespace(self.lengths).clip(self.lengths + num_tokens, max=self.capacity)
            self.lengths = assign(self.lengths, ends)

    def _positions(self, num_tokens: int) -> Array:
        first = self.lengths[:, None]
        return first if num_tokens == 1 else first + self._range[:num_tokens]

    def _rows_of(self, count: int, num_tokens: int) -> Array:
        """Return the positions of new tokens within a table; rows that are not used may be at any position."""
        return array_namespace(self.lengths).clip(self._positions(num_tokens), max=count - 1)

    # --- Rows that move -----------------------------------------------------------------------------------------------

    def reorder(self, rows: Sequence[int], sentences: Sequence[int] | None = None) -> None:
        """Replace row i by the former row rows[i].

        Args:
            rows: Indices in any order, repeats allowed.
            sentences: Sentences to keep; None keeps all. The memory has one row per sentence and is never repeated.
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
        if sentences is not None:
            indices = self._indices(sentences)
            for layer in self.layers:
                layer.cross_attention.reorder(indices)
            if self.memory is not None:
                self.memory.reorder(indices)

    def put(self, rows: Sequence[int], sentences: Sequence[int], other: DecodingCache) -> None:
        """Replace rows and sentences of a cache of fixed shape by those of a cache of the same model."""
        xp = array_namespace(self.lengths)
        lengths = [other.length] * len(rows) if other.lengths is None else other.lengths
        lengths = xp.asarray(lengths, dtype=self.lengths.dtype, device=device(self.lengths))
        self.lengths = put_rows(self.lengths, rows, lengths)
        for layer, new in zip(self.layers, other.layers, strict=True):
            layer.self_attention.put(rows, new.self_attention, self.capacity)
            layer.cross_attention.put(sentences, new.cross_attention)
        if self.memory is not None and other.memory is not None:
            self.memory.put(sentences, other.memory)

    def cut_memory(self, size: int) -> None:
        """Keep the first `size` keys of the sources."""
        if self.memory is not None:
            self.memory.resize(size)
        for layer in self.layers:
            key, value = layer.cross_attention.key, layer.cross_attention.value
            layer.cross_attention = KVCache(with_size(key, size), with_size(value, size))

    def _indices(self, numbers: Sequence[int]) -> Array:
        return from_host(array_namespace(self._like), list(numbers), dtype="int64", device=device(self._like))

    # --- Programs -----------------------------------------------------------------------------------------------------

    def arrays(self) -> list[Array | None]:
        """Return the arrays that a step reads or writes; another cache of these shapes can be copied into them.

        Raises:
            JitError: If the cache grows, since a program has fixed shapes.
        """
        if self.capacity is None:
            raise JitError("the cache grows with its tokens; use model.to_static(cache, max_length)")
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


def check_memory(memory: Array, target: Array, d_model: int) -> None:
    """Raise ShapeError unless a memory (batch, source length, d_model) fits target ids (batch, target length)."""
    check_array(memory, "memory", target.shape[0], "source length", d_model)
