"""Construction of the layers of a model from its configuration."""

from __future__ import annotations

from collections.abc import Callable
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
    OutputNorm,
    ParallelEncoderLayer,
    PostNorm,
    PreNorm,
    RelativeBias,
    Rotary,
    SandwichNorm,
    SharedNormEncoderLayer,
    Sinusoidal,
)
from xformer.layers.normalization import Norm, RMSNorm, norm_named
from xformer.layers.positions import RelativePositions
from xformer.layers.transformer import Residual
from xformer.models.config import GATED, ModelConfig


class LayerFactory:
    """Makes the layers of a model. Their parameters are drawn in the order of the calls.

    Args:
        config: Configuration of the model.
        init: Source of the parameters.
    """

    def __init__(self, config: ModelConfig, init: Initializer) -> None:
        self.config = config
        self.init = init

    def norm(self, features: int | None = None, *, init: Initializer | None = None) -> Norm:
        """Make a norm of a number of features, by default d_model."""
        c = self.config
        cls = norm_named(c.norm)
        options: dict[str, Any] = {} if cls is RMSNorm else {"bias": c.norm_bias}
        return cls(c.d_model if features is None else features, epsilon=c.norm_epsilon, **options, init=self.init)

    def final_norm(self) -> Norm | None:
        """Make the norm at the end of a stack, by default of a pre-norm stack: post-norm layers end with a norm."""
        c = self.config
        return self.norm() if (c.norm_position != "post" if c.final_norm is None else c.final_norm) else None

    def residual(self) -> Residual:
        """Make the residual connection of a sublayer."""
        c = self.config
        options: dict[str, Any] = {"dropout": c.dropout, "scale": c.residual_scale}
        if c.layer_scale:
            options["layer_scale"] = self.init.ones((c.d_model,))
        if c.norm_position == "sandwich":
            return SandwichNorm(self.norm(), self.norm(), **options)
        residuals: dict[str, Callable[..., Residual]] = {"pre": PreNorm, "post": PostNorm, "output": OutputNorm}
        return residuals[c.norm_position](self.norm(), **options)

    def attention(self, *, window: int | None = None) -> MultiHeadAttention:
        """Make an attention layer."""
        c = self.config
        return MultiHeadAttention(
            c.d_model,
            c.num_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
            bias=c.attention_bias,
            key_bias=c.key_bias,
            output_bias=c.attention_output_bias,
            norm=self.norm if c.qk_norm else None,
            norm_all_heads=c.qk_norm_all_heads,
            scale=c.attention_scale,
            softcap=c.attention_softcap,
            dropout=c.attention_dropout,
            window=window,
            init=self.init,
        )

    def feed_forward(self) -> FeedForward:
        """Make a feed-forward network, gated if the activation is."""
        c = self.config
        cls = GatedFeedForward if c.activation in GATED else FeedForward
        return cls(
            c.d_model,
            c.d_ff,
            activation=GATED.get(c.activation, c.activation),
            bias=c.feed_forward_bias,
            dropout=c.activation_dropout,
            init=self.init,
        )

    def encoder_layer(self, index: int = 0) -> EncoderLayer | SharedNormEncoderLayer:
        """Make a layer of an encoder or of a decoder-only model; `index` counts from 0."""
        if self.config.shared_norm:
            return SharedNormEncoderLayer(
                self_attention=self.attention(window=self.config.window_of(index)),
                feed_forward=self.feed_forward(),
                residual=self.residual(),
            )
        cls = ParallelEncoderLayer if self.config.parallel_residual else EncoderLayer
        return cls(
            self_attention=self.attention(window=self.config.window_of(index)),
            feed_forward=self.feed_forward(),
            self_attention_residual=self.residual(),
            feed_forward_residual=self.residual(),
        )

    def decoder_layer(self, index: int = 0) -> DecoderLayer:
        """Make a layer of the decoder of an encoder-decoder; `index` counts from 0."""
        return DecoderLayer(
            self_attention=self.attention(window=self.config.window_of(index)),
            cross_attention=self.attention(),
            feed_forward=self.feed_forward(),
            self_attention_residual=self.residual(),
            cross_attention_residual=self.residual(),
            feed_forward_residual=self.residual(),
        )

    def embedding(self, vocab_size: int) -> Embedding:
        """Make a table of token vectors."""
        c = self.config
        scale = c.scale_embeddings and not c.scale_positions
        return Embedding(vocab_size, c.d_model, scale=scale, factor=c.embedding_scale, init=self.init)

    def input_embedding(self, max_positions: int | None = None) -> InputEmbedding:
        """Make the layer between token vectors and the first layer, by default with max_positions of the model."""
        c = self.config
        positions: Sinusoidal | LearnedPositions | None = None
        if c.positions == "sinusoidal":
            positions = Sinusoidal(c.d_model, layout=c.sinusoidal_layout)
        elif c.positions == "learned":
            positions = LearnedPositions(max_positions or c.max_positions, c.d_model, init=self.init)
        return InputEmbedding(
            positions=positions,
            scale=c.scale_embeddings and c.scale_positions,
            norm=self.norm() if c.embedding_norm else None,
            dropout=c.dropout,
        )

    def relative_positions(self, *, bidirectional: bool) -> RelativePositions | None:
        """Make the relative positions of a stack's self-attention; None if the configuration has absolute ones.

        Args:
            bidirectional: True if tokens attend to later ones, as in an encoder.
        """
        c = self.config
        if c.positions == "rotary":
            return self._rotary(c.rope_theta, c.rope_scaling)
        if c.positions == "alibi":
            return ALiBi(c.num_heads)
        if c.positions == "relative":
            return RelativeBias(
                c.num_heads,
                bidirectional=bidirectional,
                num_buckets=c.relative_buckets,
                max_distance=c.relative_max_distance,
                init=self.init,
            )
        return None

    def local_positions(self) -> RelativePositions | None:
        """Make the rotary positions of layers with a window, if those have other wavelengths; else None."""
        theta = self.config.rope_local_theta
        return None if theta is None else self._rotary(theta)

    def _rotary(self, base: float, scaling: dict[str, Any] | None = None) -> Rotary:
        features = self.config.features_per_head
        return Rotary(features, base=base, features=int(features * self.config.rotary_fraction), scaling=scaling)
