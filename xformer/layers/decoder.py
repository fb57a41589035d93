"""The decoder layer of an encoder-decoder (Vaswani et al., 2017, figure 1, right)."""

from __future__ import annotations

from xformer.backends import Array
from xformer.layers.attention import MultiHeadAttention
from xformer.layers.feed_forward import FeedForward
from xformer.layers.kv_cache import LayerCache
from xformer.layers.positions import Rotation
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
        mask: Array | None = None,
        memory_mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
        causal: bool = True,
        rng: Rng | None = None,
    ) -> Array:
        """Apply the layer to a whole target.

        Args:
            x: Array of shape (batch, length, d_model).
            memory: Output of the encoder, (batch, keys, d_model).
            mask: Boolean mask of the self-attention, broadcastable to (batch, heads, length, length).
            memory_mask: Boolean mask of the cross-attention, broadcastable to (batch, heads, length, keys).
            bias: Bias of the self-attention, as for `MultiHeadAttention`.
            rotation: Rotary positions of the self-attention.
            causal: Let target tokens attend to earlier ones only.
            rng: Draws dropout; None switches it off.

        Returns:
            Array of the shape of `x`.
        """
        self_rng, self_out_rng, cross_rng, cross_out_rng, feed_rng, feed_out_rng = split_rng(rng, 6)
        x = self.self_attention_residual(
            x,
            lambda y: self.self_attention(y, mask=mask, bias=bias, rotation=rotation, causal=causal, rng=self_rng),
            self_out_rng,
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, mask=memory_mask, rng=cross_rng), cross_out_rng
        )
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, feed_rng), feed_out_rng)

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
        """Return the cross-attention weights, for inspection: (batch, heads, length, keys).

        Arguments are those of a call.
        """
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, mask=mask, bias=bias, rotation=rotation, causal=True)
        )
        weights: list[Array] = []

        def record(y: Array) -> Array:
            weights.append(self.cross_attention.weights(y, memory, mask=memory_mask))
            return y

        self.cross_attention_residual(x, record)
        return weights[0]

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
        """Apply the layer to new tokens that follow those in the cache.

        Args:
            x: Array of shape (rows, new tokens, d_model). Rows are hypotheses; neighboring rows share a sentence.
            cache: Keys and values of earlier tokens, to which the new ones are appended, and of the memory.
            mask: Boolean mask of the cached tokens; None if all of them are valid.
            memory_mask: Boolean mask of the memory, (sentences, 1, 1, keys).
            bias: Bias of the self-attention.
            rotation: Rotary positions of the new tokens.

        Returns:
            Array of the shape of `x`.
        """
        x = self.self_attention_residual(
            x,
            lambda y: self.self_attention(
                y, mask=mask, bias=bias, rotation=rotation, causal=True, cache=cache.self_attention
            ),
        )
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention.attend(y, cache.cross_attention, mask=memory_mask)
        )
        return self.feed_forward_residual(x, self.feed_forward)
