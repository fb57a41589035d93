"""The encoder-only Transformer (Devlin et al., 2019) with its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.backends import Array, array_namespace, device, dtype_name, index_dtype, to_library_of
from xformer.errors import ConfigError, ShapeError
from xformer.layers import Embedding, EncoderLayer, InputEmbedding, Linear, RelativeEmbedding, SharedNormEncoderLayer
from xformer.layers.normalization import Norm
from xformer.layers.positions import RelativePositions, position_terms
from xformer.models.base import BaseModel
from xformer.models.builder import LayerFactory
from xformer.models.config import EncoderConfig, ImageEncoderConfig
from xformer.models.token_ids import as_token_ids, ids_of, padding_mask, positions_of
from xformer.ops import activation
from xformer.random import Rng, split_rng
from xformer.tree import Module


class Pooler(Module):
    """Summary of a text, computed from the state of its first token: `activation(linear(states[:, 0]))`.

    Attributes:
        linear: Map of the state, (d_model, d_model).
        activation: "tanh" (BERT), or the name of an activation such as "relu" (DistilBERT).
        pooling: "cls", or "mean" for the mean of the states of all tokens in place of the first one (ModernBERT).
        norm: Norm of the result, or None.
    """

    linear: Linear
    activation: str
    pooling: str = "cls"
    norm: Norm | None = None

    def __call__(self, states: Array, mask: Any = None) -> Array:
        """Return the summaries (batch, d_model) of states (batch, length, d_model).

        Args:
            states: States of the last layer.
            mask: Boolean, True = token, (batch, length) or (batch, 1, 1, length); for the mean.

        Raises:
            ConfigError: If the mean needs a mask.
            ShapeError: For a mask of another shape or dtype.
        """
        if self.pooling == "mean" and mask is None:
            raise ConfigError("this model pools the mean of all tokens; pass a mask, True = token")
        x = self.linear(states[:, 0, :] if self.pooling == "cls" else mean_of_tokens(states, mask))
        x = apply_activation(self.activation, x)
        return x if self.norm is None else self.norm(x)


def apply_activation(name: str, x: Array) -> Array:
    """Return "tanh", "identity" or another activation of an array, by name."""
    if name == "identity":
        return x
    return array_namespace(x).tanh(x) if name == "tanh" else activation(name)(x)


def mean_of_tokens(states: Array, mask: Any) -> Array:
    """Return the mean of the states (batch, length, d_model) of tokens, where a mask is True; see `Pooler`."""
    xp, (batch, length, _) = array_namespace(states), states.shape
    mask = to_library_of(mask, states, "the mask is")
    if tuple(mask.shape) not in ((batch, length), (batch, 1, 1, length)):
        raise ShapeError(f"mask has shape {tuple(mask.shape)}; expected {(batch, length)}, one value for each token")
    if dtype_name(mask.dtype) != "bool":
        raise ShapeError(f"mask has dtype {dtype_name(mask.dtype)}; expected bool, True = token")
    is_token = xp.astype(xp.reshape(mask, (*states.shape[:2], 1)), states.dtype)
    return xp.sum(states * is_token, axis=1) / xp.clip(xp.sum(is_token, axis=1), min=1)


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
    activation: str

    def __call__(self, states: Array, embedding: Embedding) -> Array:
        """Return logits (batch, length, vocab_size) of states (batch, length, d_model)."""
        return embedding.unembed(self.norm(self.linear(states, self.activation))) + self.bias


class EncoderBase(BaseModel, init=False):
    """Fields of all encoders, and their classifier."""

    embedding: Module
    layers: tuple[EncoderLayer | SharedNormEncoderLayer, ...]
    norm: Norm | None
    input: InputEmbedding
    positions: RelativePositions | None
    local_positions: RelativePositions | None
    distances: RelativeEmbedding | None
    pooler: Pooler | None
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

    def _encode(self, x: Array, mask: Array | None, rngs: Sequence[Rng | None]) -> Array:
        """Apply the layers and the final norm to the output of `input`."""
        c, length = self.config, x.shape[1]
        layers = self.layers * c.num_layers if c.share_layers else self.layers
        terms = position_terms(self.positions, length, length, x)._asdict()
        local = terms if self.local_positions is None else self.local_positions.terms(length, length, x)._asdict()
        if self.distances is not None:
            terms = local = {"distances": self.distances(length)}
        options = [{"mask": mask, **(terms if c.window_of(i) is None else local)} for i in range(c.num_layers)]
        x = self._apply_layers(layers, x, options=options, rngs=rngs)
        return x if self.norm is None else self.norm(x)

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

    Example:
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
        self.classifier = Linear(c.d_model, c.num_labels, init=make.init) if c.num_labels else None

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
        x = self._add_token_types(self.embedding(tokens), token_types)
        x = self.input(x, positions_of(ids, pad_id), rng=input_rng)
        return self._encode(x, padding_mask(ids, pad_id) if mask is None else mask, layer_rngs)

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
            return x + self.token_types(xp.zeros((1,), dtype=index_dtype(xp), device=device(x)))
        types = as_token_ids(token_types, "token type", self.config.num_token_types, self._parameter)
        if tuple(types.shape) != tuple(x.shape[:2]):
            raise ShapeError(f"token_types has shape {tuple(types.shape)}; expected {tuple(x.shape[:2])}")
        return x + self.token_types(types)


def _pooler(make: LayerFactory, config: EncoderConfig | ImageEncoderConfig) -> Pooler:
    linear = Linear(config.d_model, config.d_model, bias=config.head_bias, init=make.init)
    return Pooler(linear, config.pooler, config.pooling, make.norm() if config.pooler_norm else None)


def _masked_lm_head(make: LayerFactory, config: EncoderConfig) -> MaskedLMHead:
    features = config.embedding_dim or config.d_model
    return MaskedLMHead(
        linear=Linear(config.d_model, features, bias=config.head_bias, init=make.init),
        norm=make.norm(features),
        bias=make.init.zeros((config.vocab_size,)),
        activation=config.masked_lm_activation,
    )
