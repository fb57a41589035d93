"""The decoder layer of an encoder-decoder (Vaswani et al., 2017, figure 1, right)."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array
from xformer.layers.attention import MultiHeadAttention
from xformer.layers.feed_forward import FeedForward
from xformer.layers.kv_cache import LayerCache
from xformer.layers.residual import Residual
from xformer.random import Rng, split_rng
from xformer.tree import Module


class DecoderLayer(Module):
    """Self-attention, cross-attention to the memory, then feed-forward, each in a residual connection.

    See Vaswani et al. (2017), section 3.1.

    Attributes:
        self_attention: Attention among the target tokens.
        cross_attention: Attention of the target tokens to the memory.
        feed_forward: Feed-forward network of the layer.
        self_attention_residual: Residual connection around the self-attention, `PreNorm` or `PostNorm`.
        cross_attention_residual: Residual connection around the cross-attention.
        feed_forward_residual: Residual connection around the feed-forward network.
    """

    self_attention: MultiHeadAttention
    cross_attention: MultiHeadAttention
    feed_forward: FeedForward
    self_attention_residual: Residual
    cross_attention_residual: Residual
    feed_forward_residual: Residual

    def __call__(
        self,
        x: Array,
        memory: Array,
        *,
        memory_mask: Array | None = None,
        causal: bool = True,
        rng: Rng | None = None,
        **options: Any,
    ) -> Array:
        """Apply the layer to a whole target.

        Args:
            x: Array of shape (batch, length, d_model).
            memory: Output of the encoder, (batch, keys, d_model).
            memory_mask: Boolean mask of the cross-attention, broadcastable to (batch, heads, length, keys).
            causal: Let target tokens attend to earlier ones only.
            rng: Draws dropout; None switches it off.
            **options: `mask`, `bias` and `rotation` of the self-attention, as for `MultiHeadAttention`.

        Returns:
            Array of the shape of `x`.
        """
        self_rng, self_out_rng, cross_rng, cross_out_rng, feed_rng, feed_out_rng = split_rng(rng, 6)
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, causal=causal, rng=self_rng, **options), self_out_rng
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, mask=memory_mask, rng=cross_rng), cross_out_rng
        )
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, feed_rng), feed_out_rng)

    def decode_step(self, x: Array, cache: LayerCache, *, memory_mask: Array | None = None, **options: Any) -> Array:
        """Apply the layer to new tokens that follow those in the cache.

        Args:
            x: Array of shape (rows, new tokens, d_model). Rows are hypotheses; neighboring rows share a sentence.
            cache: Keys and values of earlier tokens, to which the new ones are appended, and of the memory.
            memory_mask: Boolean mask of the memory, (sentences, 1, 1, keys).
            **options: `mask` of the cached tokens, `bias` and `rotation`, as for a call.

        Returns:
            Array of the shape of `x`.
        """
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, causal=True, cache=cache.self_attention, **options)
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.attend(y, cache.cross_attention, mask=memory_mask)
        )
        return self.feed_forward_residual(x, self.feed_forward)
