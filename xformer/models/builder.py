"""Construction of the layers of a model from its configuration."""

from __future__ import annotations

from typing import Any

from xformer import layers
from xformer.layers.attention import PROJECTIONS
from xformer.layers.normalization import NORMS, Norm, RMSNorm
from xformer.layers.positions import RelativePositions
from xformer.layers.transformer import RESIDUALS, Residual
from xformer.models.config import GATED, EncoderConfig, LanguageModelConfig, ModelConfig


class LayerFactory:
    """Makes the layers of a model. Their parameters are drawn in the order of the calls.

    Args:
        config: Configuration of the model.
        init: Source of the parameters.
    """

    def __init__(self, config: ModelConfig, init: layers.Initializer) -> None:
        self.config = config
        self.init = init

    def norm(self, features: int | None = None, *, init: layers.Initializer | None = None) -> Norm:
        """Make a norm of a number of features, by default d_model."""
        c = self.config
        cls = NORMS[c.norm]
        options: dict[str, Any] = {} if cls is RMSNorm else {"bias": c.norm_bias}
        return cls(c.d_model if features is None else features, epsilon=c.norm_epsilon, **options, init=self.init)

    def final_norm(self) -> Norm | None:
        """Make the norm at the end of a stack, by default of a pre-norm stack: post-norm layers end with a norm."""
        c = self.config
        return self.norm() if (c.norm_position != "post" if c.final_norm is None else c.final_norm) else None

    def residual(self, *, norm: bool = True) -> Residual:
        """Make the residual connection of a sublayer, without `norm` one that normalizes nothing."""
        c = self.config
        options: dict[str, Any] = {"dropout": c.dropout, "scale": c.residual_scale}
        if c.layer_scale:
            options["layer_scale"] = self.init.ones((c.d_model,))
        if not norm:
            return layers.PreNorm(layers.Identity(), **options)
        norms = [self.norm() for _ in range(2 if c.norm_position == "sandwich" else 1)]
        return RESIDUALS[c.norm_position](*norms, **options)

    def attention(self, *, window: int | None = None, disentangled: bool = False) -> layers.MultiHeadAttention:
        """Make an attention layer, disentangled or not: that of the paper, unless a family of models needs another."""
        c = self.config
        biases = zip(PROJECTIONS, (None, c.key_bias, None, c.attention_output_bias), strict=True)
        bias = [name for name, bias in biases if (c.attention_bias if bias is None else bias)]
        options: dict[str, Any] = {"num_key_value_heads": c.num_key_value_heads, "head_dim": c.head_dim, "bias": bias}
        options |= {"norm": self.norm if c.qk_norm else None, "scale": c.attention_scale, "window": window}
        options |= {"dropout": c.attention_dropout, "init": self.init}
        if not disentangled and not c.qk_norm_all_heads and not c.attention_sinks and c.attention_softcap is None:
            return layers.MultiHeadAttention(c.d_model, c.num_heads, **options)
        cls = layers.DisentangledAttention if disentangled else layers.FamilyAttention
        options |= {"norm_all_heads": c.qk_norm_all_heads, "softcap": c.attention_softcap, "sinks": c.attention_sinks}
        return cls(c.d_model, c.num_heads, **options)

    def feed_forward(self, index: int = 0) -> layers.FeedForward | layers.MixtureOfExperts:
        """Make the feed-forward network of a layer, or its mixture of experts; `index` counts from 0."""
        c = self.config
        if not c.has_experts(index):
            return self._network(c.d_ff)
        experts = [self._network(c.expert_d_ff or c.d_ff) for _ in range(c.num_experts)]
        shared = None if c.shared_expert_d_ff is None else self._network(c.shared_expert_d_ff)
        options: dict[str, Any] = {"normalize": c.normalize_expert_weights, "bias": c.router_bias, "init": self.init}
        count = c.num_experts_per_token
        return layers.MixtureOfExperts(experts, num_experts_per_token=count, shared=shared, **options)

    def _network(self, d_ff: int) -> layers.FeedForward:
        """Make a feed-forward network, gated if the activation is."""
        c: Any = self.config
        cls: type[layers.FeedForward] = layers.GatedFeedForward if c.activation in GATED else layers.FeedForward
        cls = layers.ClampedFeedForward if c.activation == "swiglu_clamped" else cls
        options: dict[str, Any] = {"bias": c.feed_forward_bias, "dropout": c.activation_dropout, "init": self.init}
        return cls(c.d_model, d_ff, activation=GATED.get(c.activation, c.activation), **options)

    def encoder_layer(
        self, index: int = 0, *, first_norm: bool = True
    ) -> layers.EncoderLayer | layers.SharedNormEncoderLayer:
        """Make a layer of an encoder or of a decoder-only model.

        Args:
            index: Number of the layer, from 0.
            first_norm: Normalize the input of self-attention.
        """
        c: Any = self.config
        attention = self.attention(window=c.window_of(index), disentangled=c.positions == "disentangled")
        options: dict[str, Any] = {"self_attention": attention, "feed_forward": self.feed_forward(index)}
        if c.shared_norm:
            return layers.SharedNormEncoderLayer(**options, residual=self.residual())
        cls: type[layers.EncoderLayer] = layers.ParallelEncoderLayer if c.parallel_residual else layers.EncoderLayer
        options["self_attention_residual"] = self.residual(norm=first_norm)
        options["feed_forward_residual"] = self.residual()
        if index == 0 and isinstance(c, EncoderConfig) and c.convolution_size:
            size, d_model = c.convolution_size, c.d_model
            cls = layers.ConvolutionEncoderLayer
            convolution = layers.Conv1d(d_model, d_model, kernel_size=size, padding=size // 2, init=self.init)
            options |= {"convolution": convolution, "convolution_norm": self.norm()}
            options["activation"] = c.convolution_activation
        return cls(**options)

    def decoder_layer(self, index: int = 0) -> layers.DecoderLayer:
        """Make a layer of the decoder of an encoder-decoder; `index` counts from 0."""
        return layers.DecoderLayer(
            self_attention=self.attention(window=self.config.window_of(index)),
            cross_attention=self.attention(),
            feed_forward=self.feed_forward(index),
            self_attention_residual=self.residual(),
            cross_attention_residual=self.residual(),
            feed_forward_residual=self.residual(),
        )

    def embedding(self, vocab_size: int, features: int | None = None) -> layers.Embedding:
        """Make a table of token vectors of a number of features, by default d_model."""
        c = self.config
        scale = c.scale_embeddings and not c.scale_positions
        return layers.Embedding(
            vocab_size, features or c.d_model, scale=scale, factor=c.embedding_scale, init=self.init
        )

    def input_embedding(
        self, max_positions: int | None = None, features: int | None = None, *, norm_first: bool = False
    ) -> layers.InputEmbedding:
        """Make the layer between token vectors and the first layer.

        Args:
            max_positions: Number of learned positions, by default that of the configuration.
            features: Features of token vectors, by default d_model; if given, the layer projects them to d_model.
            norm_first: Normalize before positions are added.
        """
        c = self.config
        positions: layers.Sinusoidal | layers.LearnedPositions | None = None
        if c.positions == "sinusoidal":
            positions = layers.Sinusoidal(features or c.d_model, layout=c.sinusoidal_layout)
        elif c.positions == "learned":
            positions = layers.LearnedPositions(max_positions or c.max_positions, features or c.d_model, init=self.init)
        norm = self.norm(features) if c.embedding_norm else None
        projection = None if features is None else layers.Linear(features, c.d_model, init=self.init)
        options: dict[str, Any] = {"norm_first": norm_first, "dropout": c.dropout, "projection": projection}
        scale = c.scale_embeddings and c.scale_positions
        return layers.InputEmbedding(positions=positions, scale=scale, norm=norm, **options)

    def relative_positions(self, *, bidirectional: bool) -> RelativePositions | None:
        """Make the relative positions of a stack's self-attention; None if the configuration has absolute ones.

        Args:
            bidirectional: True if tokens attend to later ones, as in an encoder.
        """
        c = self.config
        if c.positions == "rotary":
            return self._rotary(c.rope_theta, c.rope_scaling)
        if c.positions == "alibi":
            # The bias of a decoder falls with the position of the key, whether or not it comes after the query.
            return layers.ALiBi(
                c.num_heads, scale=c.alibi_scale, signed=isinstance(c, LanguageModelConfig) and not c.causal
            )
        return self.relative_bias(bidirectional=bidirectional) if c.positions == "relative" else None

    def relative_bias(self, *, bidirectional: bool) -> layers.RelativeBias:
        """Make the bias of relative positions of T5; arguments are those of `relative_positions`."""
        return layers.RelativeBias(self.config.num_heads, bidirectional=bidirectional, **self._buckets())

    def relative_embedding(self) -> layers.RelativeEmbedding | None:
        """Make the vectors of distances for disentangled attention; None if the configuration has other positions."""
        c: Any = self.config
        if c.positions != "disentangled":
            return None
        return layers.RelativeEmbedding(c.d_model, self.norm(), **self._buckets())

    def _buckets(self) -> dict[str, Any]:
        c = self.config
        return {"num_buckets": c.relative_buckets, "max_distance": c.relative_max_distance, "init": self.init}

    def local_positions(self) -> RelativePositions | None:
        """Make the rotary positions of layers with a window, if those have other wavelengths; else None."""
        theta = self.config.rope_local_theta
        return None if theta is None or self.config.positions != "rotary" else self._rotary(theta)

    def _rotary(self, base: float, scaling: dict[str, Any] | None = None) -> layers.Rotary:
        features = self.config.features_per_head
        return layers.Rotary(features, base=base, features=int(features * self.config.rotary_fraction), scaling=scaling)
