"""The layer of an encoder (Vaswani et al., 2017, figure 1, left) and, causal, of a decoder-only model."""

from __future__ import annotations

from xformer.backends import Array
from xformer.layers.attention import MultiHeadAttention
from xformer.layers.feed_forward import FeedForward, GatedFeedForward
from xformer.layers.kv_cache import KVCache
from xformer.layers.positions import Rotation
from xformer.layers.residual import Residual
from xformer.random import Rng
from xformer.tree import Module


class EncoderLayer(Module):
    """Self-attention, then feed-forward, each in a residual connection (PreNorm or PostNorm)."""

    self_attention: MultiHeadAttention
    feed_forward: FeedForward | GatedFeedForward
    self_attention_residual: Residual
    feed_forward_residual: Residual

    def __call__(
        self,
        x: Array,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
        causal: bool = False,
        rng: Rng | None = None,
        store: KVCache | None = None,
    ) -> Array:
        """Encode one layer; arguments other than x go to its self-attention.

        x: (batch, length, d_model). Returns the same shape.
        """
        attend_rng, attend_out, feed_rng, feed_out = rng.split(4) if rng else (None,) * 4
        x = self.self_attention_residual(
            x,
            lambda y: self.self_attention(
                y, mask=mask, bias=bias, rotation=rotation, causal=causal, rng=attend_rng, store=store
            ),
            attend_out,
        )
        return self.feed_forward_residual(x, lambda y: self.feed_forward(y, feed_rng), feed_out)
