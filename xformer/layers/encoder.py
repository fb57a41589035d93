"""The encoder layer (Vaswani et al., 2017, figure 1, left), also used by decoder-only models."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array
from xformer.layers.attention import MultiHeadAttention
from xformer.layers.feed_forward import FeedForward
from xformer.layers.residual import Residual
from xformer.random import Rng, split_rng
from xformer.tree import Module


class EncoderLayer(Module):
    """Self-attention, then feed-forward, each in a residual connection (Vaswani et al., 2017, section 3.1).

    With `causal=True` it is the layer of a decoder-only model.

    Attributes:
        self_attention: Attention of the layer.
        feed_forward: Feed-forward network of the layer.
        self_attention_residual: Residual connection around the attention, `PreNorm` or `PostNorm`.
        feed_forward_residual: Residual connection around the feed-forward network.
    """

    self_attention: MultiHeadAttention
    feed_forward: FeedForward
    self_attention_residual: Residual
    feed_forward_residual: Residual

    def __call__(self, x: Array, *, rng: Rng | None = None, **options: Any) -> Array:
        """Apply the layer.

        Args:
            x: Array of shape (batch, length, d_model).
            rng: Draws dropout; None switches it off.
            **options: `mask`, `bias`, `rotation`, `causal` and `cache`, as for `MultiHeadAttention`.

        Returns:
            Array of the shape of `x`.
        """
        attention_rng, attention_out_rng, feed_rng, feed_out_rng = split_rng(rng, 4)
        x = self.self_attention_residual(
            x, lambda y: self.self_attention(y, rng=attention_rng, **options), attention_out_rng
        )
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, feed_rng), feed_out_rng)


class ParallelEncoderLayer(EncoderLayer):
    """Self-attention and feed-forward side by side, `x + attention(norm(x)) + feed_forward(norm'(x))`.

    Introduced with GPT-J (Wang and Komatsuzaki, 2021). Fields and arguments are those of `EncoderLayer`, with pre-norm
    residual connections.
    """

    def __call__(self, x: Array, *, rng: Rng | None = None, **options: Any) -> Array:
        """Apply the layer; see `EncoderLayer`."""
        attention_rng, attention_out_rng, feed_rng, feed_out_rng = split_rng(rng, 4)
        before_attention, before_feed = self.self_attention_residual, self.feed_forward_residual
        attended = self.self_attention(before_attention.norm(x), rng=attention_rng, **options)
        fed = self.feed_forward(before_feed.norm(x), feed_rng)
        return x + before_attention.dropout(attended, attention_out_rng) + before_feed.dropout(fed, feed_out_rng)
