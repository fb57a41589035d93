"""Keys and values that decoding keeps, so that each step computes only the new token's."""

from __future__ import annotations

from dataclasses import dataclass

from xformer.namespace import Array, array_namespace


@dataclass
class KeyValueStore:
    """Keys and values of one attention layer, each (rows, heads, tokens, head_dim), or None before the first."""

    key: Array | None = None
    value: Array | None = None

    def append(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Add those of new tokens; return all of them."""
        if self.key is not None and self.value is not None:
            xp = array_namespace(key, self.key)
            key, value = xp.concat([self.key, key], axis=2), xp.concat([self.value, value], axis=2)
        self.key, self.value = key, value
        return key, value

    def select(self, rows: Array) -> None:
        """Let row i from now on be what row rows[i] was (integers, in any order, repeats allowed)."""
        if self.key is not None and self.value is not None:
            xp = array_namespace(self.key)
            self.key, self.value = (xp.take(x, rows, axis=0) for x in (self.key, self.value))


@dataclass
class LayerCache:
    """What one decoder layer keeps: the target so far grows, one row a hypothesis; the memory stays, one a sentence."""

    self_attention: KeyValueStore
    cross_attention: KeyValueStore
