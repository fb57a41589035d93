"""Multi-head attention (Vaswani et al., 2017, section 3.2.2)."""

from __future__ import annotations

from typing import Protocol

from xformer.errors import ConfigError, ShapeError
from xformer.layers.dropout import Dropout
from xformer.layers.initializer import Initializer
from xformer.layers.linear import Linear
from xformer.namespace import Array, array_namespace
from xformer.ops import attention, attention_weights
from xformer.ops.attention import check_mask
from xformer.random import Rng
from xformer.tree import Module


class KeyValueStore(Protocol):
    """What decoding hands to an attention layer to avoid computing keys and values again."""

    def update(self, layer: MultiHeadAttention, memory: Array) -> tuple[Array, Array]:
        """Return the keys and values to attend to, given the input of this call."""
        ...


class MultiHeadAttention(Module):
    """Attend with several heads, each on a slice of d_model / num_heads features.

    Self-attention: `layer(x, causal=True)`; cross-attention: `layer(x, memory, mask=masks.padding(source, 0))`.
    """

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    dropout: Dropout
    num_heads: int

    def __init__(self, d_model: int, num_heads: int, *, bias: bool = True, dropout: float = 0.0, init: Initializer):
        if num_heads < 1:
            raise ConfigError(f"num_heads is {num_heads}; expected at least 1")
        if d_model % num_heads:
            raise ConfigError(
                f"d_model {d_model} is not divisible by num_heads {num_heads}; "
                f"choose e.g. d_model {num_heads * max(1, round(d_model / num_heads))} or another num_heads"
            )
        self.query = Linear(d_model, d_model, bias=bias, init=init)
        self.key = Linear(d_model, d_model, bias=bias, init=init)
        self.value = Linear(d_model, d_model, bias=bias, init=init)
        self.output = Linear(d_model, d_model, bias=bias, init=init)
        self.dropout = Dropout(dropout)
        self.num_heads = num_heads

    def __call__(
        self,
        x: Array,
        memory: Array | None = None,
        *,
        mask: Array | None = None,
        causal: bool = False,
        rng: Rng | None = None,
        cache: KeyValueStore | None = None,
    ) -> Array:
        """Attend from x to memory (default: x itself).

        x: (batch, queries, d_model); memory: (batch, keys, d_model); mask: boolean, True = may attend,
        broadcastable to (batch, heads, queries, keys); causal: not later than the query, aligned at the end.
        rng: dropout on the attention weights. cache: keys and values of earlier calls (decoding).
        Returns (batch, queries, d_model).
        """
        query = self.split_heads(self.query(x))
        key, value = self.project(x if memory is None else memory, cache)
        keep, keep_probability = self.dropout.draw((*query.shape[:-1], key.shape[-2]), x, rng)
        heads = attention(
            query, key, value, mask, causal=causal, keep=keep, keep_probability=keep_probability
        )  # (batch, heads, queries, head_dim)
        return self.output(self.merge_heads(heads))

    def weights(
        self, x: Array, memory: Array | None = None, *, mask: Array | None = None, causal: bool = False
    ) -> Array:
        """The attention weights of each head, to look at: (batch, heads, queries, keys)."""
        query = self.split_heads(self.query(x))
        key, _ = self.project(x if memory is None else memory)
        check_mask(mask, (*query.shape[:-1], key.shape[-2]))
        return attention_weights(query, key, mask, causal=causal)

    def project(self, memory: Array, cache: KeyValueStore | None = None) -> tuple[Array, Array]:
        """The keys and values of `memory`, each (batch, heads, keys, head_dim)."""
        if cache is not None:
            return cache.update(self, memory)
        return self.split_heads(self.key(memory)), self.split_heads(self.value(memory))

    def split_heads(self, x: Array) -> Array:
        """(batch, length, d_model) -> (batch, heads, length, head_dim)."""
        if len(x.shape) != 3:
            raise ShapeError(f"x and memory must have shape (batch, length, d_model); one has {tuple(x.shape)}")
        batch, length, d_model = x.shape
        xp = array_namespace(x)
        split = xp.reshape(x, (batch, length, self.num_heads, d_model // self.num_heads))
        return xp.permute_dims(split, (0, 2, 1, 3))

    def merge_heads(self, x: Array) -> Array:
        """(batch, heads, length, head_dim) -> (batch, length, d_model)."""
        batch, heads, length, head_dim = x.shape
        xp = array_namespace(x)
        return xp.reshape(xp.permute_dims(x, (0, 2, 1, 3)), (batch, length, heads * head_dim))
