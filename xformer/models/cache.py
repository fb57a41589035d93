"""What a model keeps between the steps of decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xformer.errors import ShapeError
from xformer.layers import KeyValueStore, LayerCache
from xformer.namespace import Array, array_namespace, device, from_host


@dataclass
class Memory:
    """What an encoder-decoder keeps of the source, one row a sentence."""

    states: Array  # (sentences, keys, d_model)
    ids: Array | None  # (sentences, keys)
    mask: Array | None  # (sentences, 1, 1, keys)
    lengths: Array | None  # (sentences,): tokens of the output that is wanted, eos included
    copy_key: Array | None = None  # (sentences, keys, d_model): of the copy head

    def select(self, sentences: Array) -> None:
        """Keep only these sentences."""
        for name, x in vars(self).items():
            setattr(self, name, None if x is None else array_namespace(x).take(x, sentences, axis=0))


class DecodingCache:
    """Keys and values of all layers, and the memory; `model.begin` makes it, `model.step` fills it.

    length: how many tokens each row has so far. Rows are hypotheses, grouped by sentence, as many for each.
    """

    def __init__(self, num_layers: int, *, like: Array, memory: Memory | None = None) -> None:
        self.layers = [LayerCache(KeyValueStore(), KeyValueStore()) for _ in range(num_layers)]
        self.memory = memory
        self.length = 0
        self._like = like

    def select(self, rows: Sequence[int], sentences: Sequence[int] | None = None) -> None:
        """Let row i from now on go on from what row rows[i] was: any order, repeats allowed.

        sentences: which ones stay (None: all of them); what is kept once a sentence is never repeated.
        """
        places, kept = self._place(rows), self.layers[0].self_attention.key if self.layers else None
        moved = None
        if kept is not None and len(rows) == kept.shape[0]:
            changes = [(row, parent) for row, parent in enumerate(rows) if row != parent]
            moved = self._place([row for row, _ in changes]), self._place([parent for _, parent in changes])
        for layer in self.layers:
            layer.self_attention.select(places, moved)
        if sentences is not None:
            staying = self._place(sentences)
            for layer in self.layers:
                layer.cross_attention.select(staying)
            if self.memory is not None:
                self.memory.select(staying)

    def _place(self, numbers: Sequence[int]) -> Array:
        return from_host(array_namespace(self._like), list(numbers), dtype="int64", device=device(self._like))


def check_memory(memory: Array, target: Array, d_model: int) -> None:
    """Raise ShapeError unless a memory (batch, source length, d_model) fits target ids (batch, target length)."""
    if len(memory.shape) != 3 or memory.shape[0] != target.shape[0] or memory.shape[2] != d_model:
        raise ShapeError(
            f"memory has shape {tuple(memory.shape)}; expected ({target.shape[0]}, source length, {d_model}) for "
            f"target ids of shape {tuple(target.shape)}"
        )
