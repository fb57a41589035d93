"""The encoder-only Transformer (Devlin et al., 2019) with its heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, device, dtype_name, to_library_of
from xformer.errors import ConfigError, ShapeError
from xformer.layers import (
    Embedding,
    EncoderLayer,
    FeedForward,
    InputEmbedding,
    Linear,
    MixtureOfExperts,
    MultiHeadAttention,
    RelativeEmbedding,
    SharedNormEncoderLayer,
)
from xformer.layers.normalization import Norm
from xformer.layers.positions import RelativePositions
from xformer.layers.transformer import Residual, final
from xformer.models.base import BaseModel
from xformer.models.builder import LayerFactory
from xformer.models.config import EncoderConfig, ImageEncoderConfig
from xformer.models.token_ids import as_token_ids, ids_of, pad, padding_mask, positions_of
from xformer.ops.activations import Activation, activation
from xformer.random import Rng, split_rng
from xformer.tracing.activations import named
from xformer.tree import Module, is_array


class Pooler(Module):
    """Summary of an input, computed from the state of its first token: `activation(linear(states[:, 0]))`.

    Attributes:
        linear: Map of the state, (d_model, features).
        activation: "tanh" (BERT), "identity" (CLIP) or the name of an activation such as "relu" (DistilBERT).
        pooling: "cls", or, in place of the first token, "last" for the last one (CLIP) and "mean" for the mean of all
            (ModernBERT).
        norm: Norm of the result, or None.
    """

    linear: Linear
    activation: str
    pooling: str = "cls"
    norm: Norm | None = None

    def __call__(self, states: Array, mask: Any = None) -> Array:
        """Return the summaries (batch, features) of states (batch, length, d_model).

        Args:
            states: States of the last layer.
            mask: Boolean, True = token, (batch, length) or (batch, 1, 1, length); for the mean and the last token.
                Without a mask, all are tokens.

        Raises:
            ConfigError: If the mean needs a mask.
            ShapeError: For a mask of another shape or dtype.
        """
        if self.pooling == "mean" and mask is None:
            raise ConfigError("this model pools the mean of all tokens; pass a mask, True = token")
        if self.pooling == "cls":
            x = states[:, 0, :]
        elif self.pooling == "last" and mask is None:
            x = states[:, -1, :]
        else:
            mask = as_token_mask(mask, states)
            x = mean_of_tokens(states, last_token_mask(mask) if self.pooling == "last" else mask)
        x = apply_activation(self.activation, self.linear(x))
        return x if self.norm is None else self.norm(x)


class AttentionPooler(Module):
    """Summary of an input by attention of a learned query, and a feed-forward network (Lee et al., 2019, section 3.2).

    Attributes:
        query: The query, (1, d_model).
        attention: Attention of the query to the states.
        feed_forward: Network that gets its output.
        residual: Residual connection of the network.
    """

    query: Array
    attention: MultiHeadAttention
    feed_forward: FeedForward | MixtureOfExperts
    residual: Residual

    def __call__(self, states: Array, mask: Any = None) -> Array:
        """Return the summaries (batch, d_model) of states (batch, length, d_model); arguments as for `Pooler`."""
        xp, (batch, length, d_model) = array_namespace(states, self.query), states.shape
        query = xp.broadcast_to(self.query, (batch, 1, d_model))
        mask = None if mask is None else xp.reshape(as_token_mask(mask, states), (batch, 1, 1, length))
        return self.residual(self.attention(query, states, mask=mask), self.feed_forward)[:, 0, :]


def apply_activation(name: Any, x: Array) -> Array:
    """Return "tanh", "identity" or another activation of an array, by name."""
    if name == "identity":
        return x
    return array_namespace(x).tanh(x) if name == "tanh" else activation(name)(x)


def mean_of_tokens(states: Array, mask: Any) -> Array:
    """Return the mean of the states (batch, length, d_model) of tokens, where a mask is True; see `Pooler`."""
    xp = array_namespace(states)
    is_token = xp.astype(xp.expand_dims(as_token_mask(mask, states), axis=-1), states.dtype)
    return xp.sum(states * is_token, axis=1) / xp.clip(xp.sum(is_token, axis=1), min=1)


def last_token_mask(is_token: Array) -> Array:
    """Return the mask of the last token of each row of a mask (batch, length)."""
    xp = array_namespace(is_token)
    has_next = xp.concat([is_token[:, 1:], xp.zeros_like(is_token[:, :1])], axis=1)
    return is_token & xp.logical_not(has_next)


def normalized(x: Array) -> Array:
    """Return vectors (batch, features) divided by their length."""
    xp = array_namespace(x)
    return x / xp.clip(xp.sqrt(xp.sum(x * x, axis=1, keepdims=True)), min=1e-12)


def as_token_mask(mask: Any, states: Array) -> Array:
    """Return a mask of tokens as (batch, length) in the library of the states (batch, length, ...).

    Raises:
        ShapeError: For a mask of another shape or dtype.
    """
    batch, length = states.shape[:2]
    mask = to_library_of(mask, states, "the mask is")
    if tuple(mask.shape) not in ((batch, length), (batch, 1, 1, length)):
        raise ShapeError(f"mask has shape {tuple(mask.shape)}; expected {(batch, length)}, one value for each token")
    if dtype_name(mask.dtype) != "bool":
        raise ShapeError(f"mask has dtype {dtype_name(mask.dtype)}; expected bool, True = token")
    return array_namespace(mask).reshape(mask, (batch, length))


class MaskedLMHead(Module):
    """Head that predicts masked tokens; the output projection is the token embedding (Devlin et al., 2019, 3.1).

    Attributes:
        linear: Map of the states to the features of the embedding.
        norm: Norm of the result.
        bias: Bias of the logits, (vocab_size,).
        activation: Activation of the map.
    """

    linear: Linear
    norm: Norm
    bias: Array
    activation: Activation

    def __call__(self, states: Array, embedding: Embedding) -> Array:
        """Return logits (batch, length, vocab_size) of states (batch, length, d_model)."""
        return embedding.unembed(self.norm(self.linear(states, self.activation))) + self.bias


class EncoderBase(BaseModel, init=False):
    """Fields of all encoders, and their classifier."""

    __activations__ = ("embeddings", "states")

    embedding: Module
    layers: tuple[EncoderLayer | SharedNormEncoderLayer, ...]
    norm: Norm | None
    input: InputEmbedding
    positions: RelativePositions | None
    local_positions: RelativePositions | None
    distances: RelativeEmbedding | None
    pooler: Pooler | AttentionPooler | None
    classifier: Linear | None
    config: EncoderConfig | ImageEncoderConfig

    def _build_layers(self, make: LayerFactory, max_positions: int | None = None, features: int | None = None) -> None:
        c = self.config
        num_different = min(1, c.num_layers) if c.share_layers else c.num_layers
        self.layers = tuple(make.encoder_layer(i, first_norm=c.first_norm or i > 0) for i in range(num_different))
        self.norm = make.final_norm()
        self.input = make.input_embedding(max_positions, features)
        relative = make.relative_bias if c.relative_bias else make.relative_positions
        self.positions = relative(bidirectional=True)
        self.local_positions = make.local_positions()
        self.distances = make.relative_embedding()
        self.pooler = None if c.pooler == "none" else _pooler(make, c)

    def _encode(self, x: Array, mask: Array | None, rngs: Sequence[Rng | None], **options: Any) -> Array:
        """Apply the layers and the final norm to the output of `input`."""
        c = self.config
        layers = self.layers * c.num_layers if c.share_layers else self.layers
        if self.distances is not None:
            options["distances"] = self.distances(x.shape[1])
        positions = self._positions_of(c.num_layers, self.positions, self.local_positions)
        x = self._apply_layers(layers, x, positions=positions, rngs=rngs, mask=mask, **options)
        return named(self, "states", final(self.norm, x))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield those of `Module.named_modules`; a layer that is applied several times has as many names."""
        yield from super().named_modules(prefix)
        for i in range(len(self.layers), self.config.num_layers):
            yield from self.layers[0].named_modules(f"{prefix}.layers.{i}" if prefix else f"layers.{i}")

    def class_logits(self, states: Array, *, mask: Any = None) -> Array:
        """Compute the logits of the classes of each text or image, (batch, num_labels).

        Args:
            states: Result of a call, (batch, length, d_model).
            mask: Boolean, True = token, (batch, length) or (batch, 1, 1, length); for models with mean pooling.

        Raises:
            ConfigError: If the model has no classifier, or its mean pooling needs a mask.
            ShapeError: For a mask of another shape or dtype.
        """
        if self.classifier is None:
            raise ConfigError("this model has no classifier (num_labels is 0)")
        return self.classifier(states[:, 0, :] if self.pooler is None else self.pooler(states, mask))


class Encoder(EncoderBase, init=False):
    """Encoder-only Transformer: compute a vector for each token that depends on all tokens (Devlin et al., 2019).

    Arguments are those of `BaseModel`.

    Examples:
        >>> config = EncoderConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=1)
        >>> model = Encoder(config)
        >>> model([[5, 4, 7]]).shape
        (1, 3, 8)
    """

    config_class = EncoderConfig

    embedding: Embedding
    token_types: Embedding | None
    masked_lm: MaskedLMHead | None
    config: EncoderConfig

    def _build(self, make: LayerFactory) -> None:
        c = self.config
        self.embedding = make.embedding(c.vocab_size, c.embedding_dim)
        self.token_types = make.embedding(c.num_token_types, c.embedding_dim) if c.num_token_types else None
        self._build_layers(make, features=c.embedding_dim)
        self.masked_lm = _masked_lm_head(make, c) if c.masked_lm else None
        self.classifier = Linear(c.pooled_features, c.num_labels, init=make.init) if c.num_labels else None

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.config.vocab_size

    def __call__(
        self, tokens: Any, *, token_types: Any = None, mask: Array | None = None, rng: Rng | None = None
    ) -> Array:
        """Compute the states of the last layer.

        Args:
            tokens: Ids (batch, length), as an array of the model's library, a NumPy array or nested lists.
            token_types: Type of each token, integers (batch, length), for models with token types; default 0.
            mask: Boolean, True = may attend; broadcastable to (batch, heads, length, length). Default: tokens other
                than pad_id. With a mask, positions are counted from the first column.
            rng: Draws dropout; None switches it off.

        Returns:
            Array of shape (batch, length, d_model).

        Raises:
            DataError: For ids out of range.
            ShapeError: For other ranks, or token types of another shape.
            ConfigError: For token types that the model does not have.
        """
        tokens = as_token_ids(tokens, "token", self.config.vocab_size, self._parameter)
        input_rng, *layer_rngs = split_rng(rng, 1 + self.config.num_layers)
        ids, pad_id = ids_of(tokens), self.config.padding_id if mask is None else None
        x = self._add_token_types(named(self, "embeddings", self.embedding(tokens)), token_types)
        positions = positions_of(ids, pad_id)
        x = self.input(x, positions, rng=input_rng)
        mask = padding_mask(ids, pad_id) if mask is None else mask
        return self._encode(x, mask, layer_rngs, causal=self.config.causal, at=positions)

    def class_logits(self, inputs: Any, *, token_types: Any = None, mask: Any = None, rng: Rng | None = None) -> Array:
        """Compute the logits of the classes of each text, (batch, num_labels).

        Args:
            inputs: Token ids of each text, special tokens included: lists of any lengths, or as for a call. Or the
                result of a call, (batch, length, d_model).
            token_types: As for a call.
            mask: Boolean, True = token, (batch, length) or (batch, 1, 1, length). Default: all ids of lists, and of
                these and arrays those other than pad_id. For states, only models with mean pooling need it.
            rng: As for a call.

        Raises:
            ConfigError: If the model has no classifier, or its mean pooling of states needs a mask.
            DataError: For ids out of range.
            ShapeError: For other ranks, or a mask of another shape or dtype.
        """
        is_result = is_array(inputs) and tuple(inputs.shape[2:]) == (self.config.d_model,)
        if is_result or self.classifier is None:
            return super().class_logits(inputs, mask=mask)
        pad_id = self.config.padding_id
        if isinstance(inputs, list | tuple) and all(isinstance(row, list | tuple | np.ndarray) for row in inputs):
            rows = [np.asarray(row).tolist() for row in inputs]
            if mask is None and pad_id is None:
                mask = np.asarray(pad([[True] * len(row) for row in rows], False))
            inputs = pad(rows, pad_id)
        tokens = as_token_ids(inputs, "token", self.config.vocab_size, self._parameter)
        if mask is not None:
            batch, length = tokens.shape[:2]
            mask = array_namespace(tokens).reshape(as_token_mask(mask, tokens), (batch, 1, 1, length))
        states = self(tokens, token_types=token_types, mask=mask, rng=rng)
        return super().class_logits(states, mask=padding_mask(ids_of(tokens), pad_id) if mask is None else mask)

    def masked_lm_logits(self, states: Array) -> Array:
        """Compute the logits of the token at each position, (batch, length, vocab_size).

        Args:
            states: Result of a call, (batch, length, d_model).

        Raises:
            ConfigError: If the model has no such head.
        """
        if self.masked_lm is None:
            raise ConfigError("this model has no masked language modeling head (masked_lm is false)")
        return self.masked_lm(states, self.embedding)

    def _add_token_types(self, x: Array, token_types: Any) -> Array:
        if self.token_types is None:
            if token_types is not None:
                raise ConfigError("token_types was passed to a model without token types; expected None")
            return x
        if token_types is None:
            xp = array_namespace(x)
            return x + self.token_types(xp.zeros((1,), dtype=xp.index_dtype, device=device(x)))
        types = as_token_ids(token_types, "token type", self.config.num_token_types, self._parameter)
        if tuple(types.shape) != tuple(x.shape[:2]):
            raise ShapeError(f"token_types has shape {tuple(types.shape)}; expected {tuple(x.shape[:2])}")
        return x + self.token_types(types)


def _pooler(make: LayerFactory, config: EncoderConfig | ImageEncoderConfig) -> Pooler | AttentionPooler:
    d_model, features = config.d_model, config.pooled_features
    if config.pooler == "attention":
        query = make.init.normal((1, d_model), d_model**-0.5)
        return AttentionPooler(query, make.attention(), make.feed_forward(), make.residual())
    linear = Linear(d_model, features, bias=config.head_bias, init=make.init)
    return Pooler(linear, config.pooler, config.pooling, make.norm(features) if config.pooler_norm else None)


def _masked_lm_head(make: LayerFactory, config: EncoderConfig) -> MaskedLMHead:
    features = config.embedding_dim or config.d_model
    linear = Linear(config.d_model, features, bias=config.head_bias, init=make.init)
    bias = make.init.zeros((config.vocab_size,))
    return MaskedLMHead(linear, make.norm(features), bias, config.masked_lm_activation)
