"""The encoder (Vaswani et al., 2017, figure 1, left)."""

from __future__ import annotations

from xformer.layers.attention import MultiHeadAttention
from xformer.layers.feed_forward import FeedForward
from xformer.layers.initializer import Initializer
from xformer.layers.residual import Residual
from xformer.namespace import Array
from xformer.random import Rng
from xformer.tree import Module


class EncoderLayer(Module):
    """Self-attention, then feed-forward, each in a residual connection."""

    self_attention: MultiHeadAttention
    feed_forward: FeedForward
    self_attention_residual: Residual
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
        self.feed_forward = FeedForward(d_model, d_ff, activation=activation, dropout=activation_dropout, init=init)
        self.self_attention_residual, self.feed_forward_residual = (
            Residual(d_model, pre_norm=pre_norm, dropout=dropout, epsilon=epsilon, init=init) for _ in range(2)
        )

    def __call__(self, x: Array, *, mask: Array | None = None, rng: Rng | None = None) -> Array:
        """x: (batch, length, d_model); mask: True = may attend. Returns the same shape as x."""
        attend_rng, attend_out, feed_rng, feed_out = rng.split(4) if rng else (None,) * 4
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, mask=mask, rng=attend_rng), attend_out)
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, feed_rng), feed_out)
