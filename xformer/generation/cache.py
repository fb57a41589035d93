"""Keys and values of the tokens decoded so far, so that each step computes only the new token's."""

from __future__ import annotations

from dataclasses import dataclass

from xformer.layers import MultiHeadAttention
from xformer.models import Transformer
from xformer.namespace import Array, array_namespace


@dataclass
class GrowingStore:
    """Keys and values of self-attention: each call appends those of the new tokens."""

    key: Array | None = None  # (batch, heads, tokens so far, head_dim)
    value: Array | None = None

    def update(self, layer: MultiHeadAttention, memory: Array) -> tuple[Array, Array]:
        """Append the keys and values of the new tokens; return all of them."""
        key, value = layer.project(memory)
        if self.key is not None:
            xp = array_namespace(key, self.key)
            key, value = xp.concat([self.key, key], axis=2), xp.concat([self.value, value], axis=2)
        self.key, self.value = key, value
        return key, value


@dataclass
class FixedStore:
    """Keys and values of cross-attention: the memory does not change, so they are computed once."""

    key: Array | None = None
    value: Array | None = None

    def update(self, layer: MultiHeadAttention, memory: Array) -> tuple[Array, Array]:
        """Return the keys and values of the memory."""
        if self.key is None or self.value is None:
            self.key, self.value = layer.project(memory)
        return self.key, self.value


@dataclass
class LayerStores:
    """The stores of one decoder layer."""

    self_attention: GrowingStore
    cross_attention: FixedStore


class DecodingCache:
    """The stores of a whole decoder."""

    def __init__(self, model: Transformer) -> None:
        self.layers = [LayerStores(GrowingStore(), FixedStore()) for _ in model.decoder]

    @property
    def length(self) -> int:
        """How many tokens the stores hold."""
        first = self.layers[0].self_attention.key if self.layers else None
        return 0 if first is None else int(first.shape[2])

    def select(self, rows: Array) -> None:
        """Keep only these rows of the batch (integers, in any order, repeats allowed)."""
        for layer in self.layers:
            for store in (layer.self_attention, layer.cross_attention):
                if store.key is not None and store.value is not None:
                    xp = array_namespace(store.key)
                    store.key, store.value = (xp.take(x, rows, axis=0) for x in (store.key, store.value))
