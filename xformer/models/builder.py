"""From a configuration to the parts that a model is put together from."""

from __future__ import annotations

from typing import Any

from xformer.layers import (
    ALiBi,
    DecoderLayer,
    Embedding,
    EncoderLayer,
    FeedForward,
    GatedFeedForward,
    Initializer,
    InputEmbedding,
    LearnedPositions,
    MultiHeadAttention,
    PostNorm,
    PreNorm,
    RelativeBias,
    Rotary,
    Sinusoidal,
)
from xformer.layers.normalization import Norm, RMSNorm, norm_named
from xformer.layers.positions import RelativePositions
from xformer.layers.residual import Residual
from xformer.models.config import GATED, ModelConfig


class LayerFactory:
    """Makes the parts of one model, drawing their parameters one after the other."""

    def __init__(self, config: ModelConfig, init: Initializer) -> None:
        self.config = config
        self.init = init

    def norm(self) -> Norm:
        """A norm of d_model features."""
        c = self.config
        kind = norm_named(c.norm)
        differences: dict[str, Any] = {} if c.norm_bias or kind is RMSNorm else {"bias": False}
        return kind(c.d_model, epsilon=c.norm_epsilon, **differences, init=self.init)

    def final_norm(self) -> Norm | None:
        """The norm at the end of a stack: a pre-norm stack ends with a sum that no norm has seen yet."""
        return self.norm() if self.config.norm_position == "pre" else None

    def residual(self) -> Residual:
        """What a sublayer is wrapped in."""
        kind = PreNorm if self.config.norm_position == "pre" else PostNorm
        return kind(self.norm(), dropout=self.config.dropout)

    def attention(self, **differences: Any) -> MultiHeadAttention:
        """An attention layer."""
        c = self.config
        settings: dict[str, Any] = {
            "num_key_value_heads": c.num_key_value_heads,
            "bias": c.attention_bias,
            "dropout": c.attention_dropout,
            "window": c.window,
        }
        return MultiHeadAttention(c.d_model, c.num_heads, **(settings | differences), init=self.init)

    def feed_forward(self) -> FeedForward | GatedFeedForward:
        """A feed-forward network, gated where the activation says so."""
        c = self.config
        kind: Any = GatedFeedForward if c.activation in GATED else FeedForward
        activation = GATED.get(c.activation, c.activation)
        made: FeedForward | GatedFeedForward = kind(
            c.d_model,
            c.d_ff,
            activation=activation,
            bias=c.feed_forward_bias,
            dropout=c.activation_dropout,
            init=self.init,
        )
        return made

    def encoder_layer(self) -> EncoderLayer:
        """A layer of an encoder or of a decoder-only model."""
        return EncoderLayer(
            self_attention=self.attention(),
            feed_forward=self.feed_forward(),
            self_attention_residual=self.residual(),
            feed_forward_residual=self.residual(),
        )

    def decoder_layer(self) -> DecoderLayer:
        """A layer of an encoder-decoder's decoder."""
        return DecoderLayer(
            self_attention=self.attention(),
            cross_attention=self.attention(window=None),
            feed_forward=self.feed_forward(),
            self_attention_residual=self.residual(),
            cross_attention_residual=self.residual(),
            feed_forward_residual=self.residual(),
        )

    def embedding(self, vocab_size: int) -> Embedding:
        """A table of token vectors."""
        c = self.config
        return Embedding(vocab_size, c.d_model, scale=c.scale_embeddings and not c.scale_positions, init=self.init)

    def input_embedding(self) -> InputEmbedding:
        """What becomes of token vectors before the first layer."""
        c = self.config
        positions: Sinusoidal | LearnedPositions | None = None
        if c.positions == "sinusoidal":
            positions = Sinusoidal(c.d_model)
        elif c.positions == "learned":
            positions = LearnedPositions(c.max_positions, c.d_model, init=self.init)
        return InputEmbedding(
            positions=positions,
            scale=c.scale_embeddings and c.scale_positions,
            norm=self.norm() if c.embedding_norm else None,
            dropout=c.dropout,
        )

    def relative_positions(self, *, bidirectional: bool) -> RelativePositions | None:
        """The scheme inside a stack's self-attention, if it has one; bidirectional: tokens see later ones, too."""
        c = self.config
        if c.positions == "rotary":
            return Rotary(c.d_model // c.num_heads)
        if c.positions == "alibi":
            return ALiBi(c.num_heads)
        if c.positions == "relative":
            return RelativeBias(c.num_heads, bidirectional=bidirectional, init=self.init)
        return None
