"""State that a model keeps between the steps of decoding."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from xformer.backends import Array, array_namespace, assign, device, from_host
from xformer.errors import ConfigError
from xformer.layers import InputEmbedding, KVCache, LayerCache, StaticKVCache
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
        for name, axis in (("states", 1), ("ids", 1), ("mask", 3), ("lengths", 0), ("copy_key", 1)):
            x, y = getattr(self, name), getattr(other, name)
            if x is not None:
                x, y = (
                    each if each.shape[axis] == keys or not axis else with_size(each, keys, axis) for each in (x, y)
                )
                setattr(self, name, put_rows(x, sentences, y))

    def copy(self) -> Memory:
        """Return a copy that shares no arrays with this memory."""
        arrays: Any = (None if x is None else array_namespace(x).asarray(x, copy=True) for x in vars(self).values())
        return Memory(*arrays)


class DecodingCache:
    """Keys and values of all layers, and the memory of an encoder-decoder.

    `Transformer.prefill` and `LanguageModel.init_cache` make it; `decode_step` fills it. Rows are hypotheses, grouped
    by sentence, the same number for each.

    Args:
        num_layers: Number of decoder layers.
        like: Array (..., d_model) of the library, dtype and device of the model.
        memory: Encoded source.

    Attributes:
        length: Number of tokens per row; of the longest one if they differ.
        lengths: Number of tokens of each row, integers (rows,), if they differ. Shorter rows end with padding, so only
            a `StaticCache` made of this cache can take further tokens.
    """

    lengths: Array | None = None

    def __init__(self, num_layers: int, *, like: Array, memory: Memory | None = None) -> None:
        self.layers = [LayerCache(KVCache(), KVCache()) for _ in range(num_layers)]
        self.memory = memory
        self.length = 0
        self._like = like

    def mask(self, num_tokens: int) -> Array | None:
        """Return a boolean mask of the cached and new tokens, (rows, 1, 1, tokens); None if all are valid."""
        if self.lengths is not None:
            raise ConfigError(
                "rows of different lengths take no further tokens; use model.to_static(cache, max_length)"
            )
        return None

    def embed(self, layer: InputEmbedding, x: Array) -> Array:
        """Apply an `InputEmbedding` to the vectors of new tokens, (rows, new tokens, d_model)."""
        return layer(x, start=self.length)

    def position_terms(
        self, positions: Sequence[RelativePositions | None], num_tokens: int, like: Array, lengths: Array | None = None
    ) -> list[PositionTerms]:
        """Return the terms of each of the model's relative positions for new tokens; `lengths` if rows differ."""
        sizes = None if lengths is None else lengths[:, None, None]
        return [position_terms(each, num_tokens, self.length + num_tokens, like, sizes) for each in positions]

    def positions(self, num_tokens: int, like: Array) -> Array:
        """Return the positions of new tokens, (num_tokens,) or (rows, num_tokens), in the integer dtype of `like`."""
        return array_namespace(like).arange(
            self.length, self.length + num_tokens, dtype=like.dtype, device=device(like)
        )

    def advance(self, num_tokens: int, lengths: Array | None = None) -> None:
        """Count new tokens, once all layers hold them; their lengths if those of rows differ."""
        self.length += num_tokens
        self.lengths = lengths

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

    def _indices(self, numbers: Sequence[int]) -> Array:
        return from_host(array_namespace(self._like), list(numbers), dtype="int64", device=device(self._like))


class StaticCache(DecodingCache):
    """A cache of fixed shape, filled by steps of one or a few tokens; `to_static` makes it.

    Everything that changes between steps is in arrays, updated in place if the backend allows it: a step can be traced
    by `jit`, or run as a CUDA graph. Rows may have different lengths; smaller lengths drop the last tokens.

    Args:
        cache: Cache to start from, with at least one token; another StaticCache is extended.
        max_length: Capacity in tokens.
        layer: Input embedding of the decoder.
        positions: Relative positions of the decoder's layers.

    Attributes:
        lengths: Number of tokens of each row, which is the position of its next token, integers (rows,).
    """

    lengths: Array

    def __init__(
        self,
        cache: DecodingCache,
        max_length: int,
        layer: InputEmbedding,
        positions: Sequence[RelativePositions | None],
    ) -> None:
        like = cache._like
        xp, like_device = array_namespace(like), device(like)
        self.memory = None if cache.memory is None else cache.memory.copy()  # its arrays may be overwritten
        self.length, self._like = cache.length, like
        self._caches = [StaticKVCache(old.self_attention, max_length) for old in cache.layers]
        key: Any = self._caches[0].key
        lengths: Any = [cache.length] * key.shape[0] if cache.lengths is None else cache.lengths
        self.lengths = xp.asarray(lengths, dtype=xp.int64, device=like_device, copy=True)
        self.layers = [
            LayerCache(static, old.cross_attention) for static, old in zip(self._caches, cache.layers, strict=True)
        ]
        self._position_embeddings = layer.position_embeddings(max_length, like)
        self._range = xp.arange(max_length, dtype=xp.int64, device=like_device)
        self._position_terms = []
        for each in positions:
            rotation, bias = position_terms(each, 1, max_length, like)
            if rotation is not None:  # of all positions, each the last one of its text
                rotation = position_terms(each, max_length, max_length, like, self._range[:, None] + 1).rotation
                rotation = Rotation(*(xp.asarray(angle, copy=True) for angle in rotation or ()))  # others use the table
            self._position_terms.append(PositionTerms(rotation, bias))

    def arrays(self) -> list[Array | None]:
        """Return the arrays that a step reads or writes; another cache of these shapes can be copied into them."""
        memory = () if self.memory is None else vars(self.memory).values()
        terms = (x for rotation, bias in self._position_terms for x in (*(rotation or (None, None)), bias))
        caches = (cache for layer in self.layers for cache in (layer.self_attention, layer.cross_attention))
        keys_and_values = (x for cache in caches for x in (cache.key, cache.value))
        return [self.lengths, *memory, *keys_and_values, self._position_embeddings, *terms]

    def put(self, rows: Sequence[int], sentences: Sequence[int], other: DecodingCache) -> None:
        """Replace rows and sentences by those of a cache of the same model."""
        xp = array_namespace(self.lengths)
        lengths: Any = [other.length] * len(rows) if other.lengths is None else other.lengths
        lengths = xp.asarray(lengths, dtype=self.lengths.dtype, device=device(self.lengths))
        self.lengths = put_rows(self.lengths, rows, lengths)
        for layer, new in zip(self.layers, other.layers, strict=True):
            layer.self_attention.put(rows, new.self_attention)
            layer.cross_attention.put(sentences, new.cross_attention)
        if self.memory is not None and other.memory is not None:
            self.memory.put(sentences, other.memory)

    def cut_memory(self, size: int) -> None:
        """Keep the first `size` keys of the sources."""
        for name, axis in (("states", 1), ("ids", 1), ("mask", 3), ("copy_key", 1)):
            x = getattr(self.memory, name)
            setattr(self.memory, name, None if x is None else with_size(x, size, axis))
        for layer in self.layers:
            key, value = layer.cross_attention.key, layer.cross_attention.value
            layer.cross_attention = KVCache(with_size(key, size), with_size(value, size))

    def alias(self) -> StaticCache:
        """Return a cache with the same arrays, which `reorder` may replace without changing this cache."""
        alias = copy.copy(self)
        alias.memory = copy.copy(self.memory)
        alias._caches = [copy.copy(cache) for cache in self._caches]
        alias.layers = [
            LayerCache(cache, copy.copy(layer.cross_attention))
            for cache, layer in zip(alias._caches, self.layers, strict=True)
        ]
        return alias

    def copy(self, *, shares_tokens: bool) -> StaticCache:
        """Return a cache that shares no arrays with this one, but the keys and values of the tokens on request."""
        tokens = [x for cache in self._caches for x in (cache.key, cache.value)] if shares_tokens else []
        return copy.deepcopy(self, {id(x): x for x in [self._like, *tokens]})

    def mask(self, num_tokens: int) -> Array:
        """Return a boolean mask of the tokens up to each new one, (rows, 1, num_tokens, max_length)."""
        xp = array_namespace(self.lengths)
        # Where the layers write the keys and values of the new tokens, in an array of (rows * heads * tokens) vectors.
        key: Any = self._caches[0].key
        rows, heads, max_length, _ = key.shape
        if self.length + num_tokens > max_length:
            raise ConfigError(
                f"the cache is full: it holds {max_length} tokens; use model.to_static(cache, max_length)"
            )
        starts = xp.arange(rows * heads, dtype=xp.int64, device=device(self.lengths)) * max_length
        columns = self._rows_of(max_length, num_tokens)
        slots = xp.reshape(starts, (rows, heads, 1)) + columns[:, None, :]
        for cache in self._caches:
            cache.index, cache.slots = self.lengths, xp.reshape(slots, (rows * heads * num_tokens,))
        return (self._range <= self._positions(num_tokens)[:, :, None])[:, None, :, :]

    def embed(self, layer: InputEmbedding, x: Array) -> Array:
        """Apply an `InputEmbedding` to the vectors of new tokens, (rows, new tokens, d_model)."""
        table = self._position_embeddings
        if table is None:
            return layer(x)
        return layer(x, position_embeddings=embedding(table, self._rows_of(table.shape[0], x.shape[1])))

    def position_terms(
        self, positions: Sequence[RelativePositions | None], num_tokens: int, like: Array, lengths: Array | None = None
    ) -> list[PositionTerms]:
        """Return the terms of each of the model's relative positions for new tokens of each row."""
        xp, size = array_namespace(like), self._range.shape[0]
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
        """Return the positions of new tokens, (rows, num_tokens), in the integer dtype of `like`."""
        return array_namespace(like).astype(self._positions(num_tokens), like.dtype, copy=False)

    def _positions(self, num_tokens: int) -> Array:
        first = self.lengths[:, None]
        return first if num_tokens == 1 else first + self._range[:num_tokens]

    def _rows_of(self, count: int, num_tokens: int) -> Array:
        """Return the positions of new tokens within a table; rows that are not used may be at any position."""
        return array_namespace(self.lengths).clip(self._positions(num_tokens), max=count - 1)

    def advance(self, num_tokens: int, lengths: Array | None = None) -> None:
        """Count new tokens of each row."""
        self.length += num_tokens
        key: Any = self._caches[0].key
        lengths = array_namespace(self.lengths).clip(self.lengths + num_tokens, max=key.shape[2])
        self.lengths = assign(self.lengths, lengths)


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
