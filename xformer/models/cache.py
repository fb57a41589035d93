"""What a model keeps between the steps of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xformer.backends import Array, array_namespace, assign, device, from_host
from xformer.errors import ShapeError
from xformer.layers import InputEmbedding, KVCache, LayerCache, StaticKVCache
from xformer.layers.positions import PositionTerms, RelativePositions, Rotation, position_terms


@dataclass
class Memory:
    """What an encoder-decoder keeps of the source, one row a sentence."""

    states: Array  # (sentences, keys, d_model)
    ids: Array | None  # (sentences, keys)
    mask: Array | None  # (sentences, 1, 1, keys)
    lengths: Array | None  # (sentences,): tokens of the output that is wanted, eos included
    copy_key: Array | None = None  # (sentences, keys, d_model): of the copy head

    def reorder(self, sentences: Array) -> None:
        """Keep only these sentences."""
        for name, x in vars(self).items():
            setattr(self, name, None if x is None else array_namespace(x).take(x, sentences, axis=0))


class DecodingCache:
    """Keys and values of all layers, and the memory; `model.prefill` or `init_cache` makes it, `decode_step` fills it.

    length: how many tokens each row has so far (in a StaticCache: had at first). Rows are hypotheses, grouped by
    sentence, as many for each.
    """

    def __init__(self, num_layers: int, *, like: Array, memory: Memory | None = None) -> None:
        self.layers = [LayerCache(KVCache(), KVCache()) for _ in range(num_layers)]
        self.memory = memory
        self.length = 0
        self._like = like

    @property
    def mask(self) -> Array | None:
        """Which of the tokens that are kept count: None, all of them."""
        return None

    def embed(self, layer: InputEmbedding, x: Array) -> Array:
        """Token vectors (rows, new tokens, d_model) with what their positions add."""
        return layer(x, start=self.length)

    def position_terms(self, positions: RelativePositions | None, new: int, like: Array) -> PositionTerms:
        """What a relative scheme says of so many new tokens."""
        return position_terms(positions, new, self.length + new, like)

    def numbers(self, new: int, like: Array) -> Array:
        """The positions of so many new tokens, integers of the dtype of `like`."""
        first, xp = self.length, array_namespace(like)
        return xp.arange(first, first + new, dtype=like.dtype, device=device(like))

    def advance(self, new: int) -> None:
        """So many tokens are in all stores now."""
        self.length += new

    def reorder(self, rows: Sequence[int], sentences: Sequence[int] | None = None) -> None:
        """Let row i from now on go on from what row rows[i] was: any order, repeats allowed.

        sentences: which ones stay (None: all of them); what is kept once a sentence is never repeated.
        """
        stores = [layer.self_attention for layer in self.layers]  # they grow together, so what one can do all can
        kept = stores[0].key if stores and stores[0].is_own else None
        if kept is not None and len(rows) == kept.shape[0]:
            changed = [row for row, parent in enumerate(rows) if row != parent]
            targets, sources = self._place(changed), self._place([rows[row] for row in changed])
            for store in stores:
                store.move(targets, sources)
        else:
            places = self._place(rows)
            for store in stores:
                store.reorder(places)
        if sentences is not None:
            staying = self._place(sentences)
            for layer in self.layers:
                layer.cross_attention.reorder(staying)
            if self.memory is not None:
                self.memory.reorder(staying)

    def _place(self, numbers: Sequence[int]) -> Array:
        return from_host(array_namespace(self._like), list(numbers), dtype="int64", device=device(self._like))


class StaticCache(DecodingCache):
    """A cache of fixed shape for at most max_length tokens, filled one token per step.

    What changes from step to step is in arrays, in place where they can be written: a step may be recorded once and
    repeated (CUDA graphs), or compiled. place: how many tokens there are, (1,) integers.
    """

    def __init__(
        self, cache: DecodingCache, max_length: int, layer: InputEmbedding, positions: RelativePositions | None
    ) -> None:
        like = cache._like
        xp, on = array_namespace(like), device(like)
        self.memory, self.length, self._like = cache.memory, cache.length, like
        self.place = xp.asarray([cache.length], dtype=xp.int64, device=on)
        self._stores = [StaticKVCache(kept.self_attention, max_length, self.place) for kept in cache.layers]
        self.layers = [
            LayerCache(store, kept.cross_attention) for store, kept in zip(self._stores, cache.layers, strict=True)
        ]
        self._offsets = layer.position_embeddings(max_length, like)
        self._first = cache.length  # what comes before has its place
        self._placement = position_terms(positions, max_length - cache.length, max_length, like)
        self._here = xp.arange(max_length, dtype=xp.int64, device=on)

    @property
    def mask(self) -> Array:
        """True for the tokens so far, the new one included: (1, max_length)."""
        return array_namespace(self.place).expand_dims(self._here <= self.place, axis=0)

    def embed(self, layer: InputEmbedding, x: Array) -> Array:
        """Token vectors of one token with what its position adds."""
        return layer(x, position_embeddings=self._offsets if self._offsets is None else self._row(self._offsets, 0))

    def position_terms(self, positions: RelativePositions | None, new: int, like: Array) -> PositionTerms:
        """What a relative scheme says of one new token."""
        rotation, bias = self._placement
        return PositionTerms(
            None if rotation is None else Rotation(*(self._row(angle, 0, self._first) for angle in rotation)),
            None if bias is None else self._row(bias, 1, self._first),
        )

    def numbers(self, new: int, like: Array) -> Array:
        """The position of one new token."""
        return array_namespace(like).astype(self.place, like.dtype, copy=False)

    def advance(self, new: int) -> None:
        """One token more is in all stores now."""
        self.place = assign(self.place, self.place + new)
        for store in self._stores:
            store.place = self.place

    def _row(self, x: Array, axis: int, first: int = 0) -> Array:
        return array_namespace(x).take(x, self.place - first, axis=axis)


def check_memory(memory: Array, target: Array, d_model: int) -> None:
    """Raise ShapeError unless a memory (batch, source length, d_model) fits target ids (batch, target length)."""
    if len(memory.shape) != 3 or memory.shape[0] != target.shape[0] or memory.shape[2] != d_model:
        raise ShapeError(
            f"memory has shape {tuple(memory.shape)}; expected ({target.shape[0]}, source length, {d_model}) for "
            f"target ids of shape {tuple(target.shape)}"
        )
