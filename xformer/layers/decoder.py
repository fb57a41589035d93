"""The layer of an encoder-decoder's decoder (Vaswani et al., 2017, figure 1, right)."""

from __future__ import annotations

from xformer.backends import Array
from xformer.layers.attention import MultiHeadAttention
from xformer.layers.feed_forward import FeedForward, GatedFeedForward
from xformer.layers.kv_cache import LayerCache
from xformer.layers.positions import Rotation
from xformer.layers.residual import Residual
from xformer.random import Rng
from xformer.tree import Module


class DecoderLayer(Module):
    """Self-attention, attention to the memory, then feed-forward, each in a residual connection."""

    self_attention: MultiHeadAttention
    cross_attention: MultiHeadAttention
    feed_forward: FeedForward | GatedFeedForward
    self_attention_residual: Residual
    cross_attention_residual: Residual
    feed_forward_residual: Residual

    def __call__(
        self,
        x: Array,
        memory: Array,
        *,
        mask: Array | None = None,
        memory_mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
        causal: bool = True,
        rng: Rng | None = None,
    ) -> Array:
        """Decode one layer.

        x: (batch, length, d_model); memory: (batch, keys, d_model); masks: True = may attend, for the target's own
        tokens and for the memory; bias, rotation, causal: of the self-attention. Returns the same shape as x.
        """
        own_rng, own_out, cross_rng, cross_out, feed_rng, feed_out = rng.split(6) if rng else (None,) * 6
        x = self.self_attention_residual(
            x,
            lambda y: self.self_attention(y, mask=mask, bias=bias, rotation=rotation, causal=causal, rng=own_rng),
            own_out,
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, mask=memory_mask, rng=cross_rng), cross_out
        )
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, feed_rng), feed_out)

    def cross_attention_weights(
        self,
        x: Array,
        memory: Array,
        *,
        mask: Array | None = None,
        memory_mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
    ) -> Array:
        """How each query attends to the memory, to look at: (batch, heads, queries, keys). Arguments as above."""
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, mask=mask, bias=bias, rotation=rotation, causal=True)
        )
        found: list[Array] = []

        def look(y: Array) -> Array:
            found.append(self.cross_attention.weights(y, memory, mask=memory_mask))
            return y

        self.cross_attention_residual(x, look)
        return found[0]

    def decode_step(
        self,
        x: Array,
        cache: LayerCache,
        *,
        mask: Array | None = None,
        memory_mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
    ) -> Array:
        """Decode new tokens after those in the cache, which also holds the memory's keys and values.

        x: (rows, new tokens, d_model); mask: of the tokens, where not all that are kept count; memory_mask: (sentences,
        1, 1, keys). Returns the same shape as x.
        """
        store = cache.self_attention
        x = self.self_attention_residual(
            x,
            lambda y: self.self_attention(y, mask=mask, bias=bias, rotation=rotation, causal=True, store=store),
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.attend(y, cache.cross_attention, mask=memory_mask)
        )
        return self.feed_forward_residual(x, self.feed_forward)
