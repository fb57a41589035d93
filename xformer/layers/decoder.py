"""The decoder (Vaswani et al., 2017, figure 1, right)."""

from __future__ import annotations

from typing import Protocol

from xformer.layers.attention import KeyValueStore, MultiHeadAttention
from xformer.layers.feed_forward import FeedForward
from xformer.layers.initializer import Initializer
from xformer.layers.residual import Residual
from xformer.namespace import Array
from xformer.random import Rng
from xformer.tree import Module


class LayerCache(Protocol):
    """The stores of one decoder layer: growing keys and values of the target, fixed ones of the memory."""

    @property
    def self_attention(self) -> KeyValueStore:
        """Keys and values of the target so far."""

    @property
    def cross_attention(self) -> KeyValueStore:
        """Keys and values of the memory."""


class DecoderLayer(Module):
    """Causal self-attention, attention to the memory, then feed-forward, each in a residual connection."""

    self_attention: MultiHeadAttention
    cross_attention: MultiHeadAttention
    feed_forward: FeedForward
    self_attention_residual: Residual
    cross_attention_residual: Residual
    feed_forward_residual: Residual

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        d_ff: int,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: str = "relu",
        pre_norm: bool = True,
        attention_bias: bool = True,
        epsilon: float = 1e-5,
        init: Initializer,
    ):
        self.self_attention = MultiHeadAttention(
            d_model, num_heads, bias=attention_bias, dropout=attention_dropout, init=init
        )
        self.cross_attention = MultiHeadAttention(
            d_model, num_heads, bias=attention_bias, dropout=attention_dropout, init=init
        )
        self.feed_forward = FeedForward(d_model, d_ff, activation=activation, dropout=activation_dropout, init=init)
        self.self_attention_residual, self.cross_attention_residual, self.feed_forward_residual = (
            Residual(d_model, pre_norm=pre_norm, dropout=dropout, epsilon=epsilon, init=init) for _ in range(3)
        )

    def __call__(
        self,
        x: Array,
        memory: Array,
        *,
        mask: Array | None = None,
        memory_mask: Array | None = None,
        rng: Rng | None = None,
        cache: LayerCache | None = None,
    ) -> Array:
        """Decode one layer.

        x: (batch, length, d_model); memory: (batch, keys, d_model); masks: True = may attend, for the target's own
        tokens (causality is added here) and for the memory. With a cache, x holds only the new tokens.
        """
        own_rng, own_out, cross_rng, cross_out, feed_rng, feed_out = rng.split(6) if rng else (None,) * 6
        own, cross = (cache.self_attention, cache.cross_attention) if cache else (None, None)
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, mask=mask, causal=True, rng=own_rng, cache=own), own_out
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, mask=memory_mask, rng=cross_rng, cache=cross), cross_out
        )
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, feed_rng), feed_out)

    def cross_attention_weights(
        self, x: Array, memory: Array, *, mask: Array | None = None, memory_mask: Array | None = None
    ) -> Array:
        """How each query attends to the memory, to look at: (batch, heads, queries, keys)."""
        y = self.self_attention_residual(x, lambda y: self.self_attention(y, mask=mask, causal=True))
        residual = self.cross_attention_residual
        return self.cross_attention.weights(residual.norm(y) if residual.pre_norm else y, memory, mask=memory_mask)
