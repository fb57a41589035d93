"""The encoder-only Transformer (Devlin et al., 2019) with its heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xformer.backends import Array, array_namespace, device, index_dtype
from xformer.errors import ConfigError, ShapeError
from xformer.layers import Embedding, EncoderLayer, InputEmbedding, Linear, SharedNormEncoderLayer
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
        activation: "tanh" (BERT) or "relu" (DistilBERT).
    """

    linear: Linear
    activation: str

    def __call__(self, states: Array) -> Array:
        """Return the summaries (batch, d_model) of states (batch, length, d_model)."""
        x = self.linear(states[:, 0, :])
        return array_namespace(x).tanh(x) if self.activation == "tanh" else activation(self.activation)(x)


class MaskedLMHead(Module):
    """Head that predicts masked tokens; the output projection is the token embedding (Devlin et al., 2019, 3.1).

    Attributes:
        linear: Map of the states, (d_model, d_model).
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
    pooler: Pooler | None
    classifier: Linear | None
    config: EncoderConfig | ImageEncoderConfig

    def _build_layers(self, make: LayerFactory, max_positions: int | None = None) -> None:
        c = self.config
        self.layers = tuple(make.encoder_layer(i) for i in range(c.num_layers))
        self.norm = make.final_norm()
        self.input = make.input_embedding(max_positions)
        self.positions = make.relative_positions(bidirectional=True)
        self.pooler = None if c.pooler == "none" else Pooler(Linear(c.d_model, c.d_model, init=make.init), c.pooler)

    def _encode(self, x: Array, mask: Array | None, rngs: Sequence[Rng | None]) -> Array:
        """Apply the layers and the final norm to the output of `input`."""
        terms = position_terms(self.positions, x.shape[1], x.shape[1], x)._asdict()
        x = self._apply_layers(self.layers, x, options={"mask": mask, **terms}, rngs=rngs)
        return x if self.norm is None else self.norm(x)

    def class_logits(self, states: Array) -> Array:
        """Compute the logits of the classes of each text or image, (batch, num_labels).

        Args:
            states: Result of a call, (batch, length, d_model).

        Raises:
            ConfigError: If the model has no classifier.
        """
        if self.classifier is None:
            raise ConfigError("this model has no classifier (num_labels is 0)")
        return self.classifier(states[:, 0, :] if self.pooler is None else self.pooler(states))


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
        self.embedding = make.embedding(c.vocab_size)
        self.token_types = make.embedding(c.num_token_types) if c.num_token_types else None
        self._build_layers(make)
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
        input_rng, *layer_rngs = split_rng(rng, 1 + len(self.layers))
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


def _masked_lm_head(make: LayerFactory, config: EncoderConfig) -> MaskedLMHead:
    return MaskedLMHead(
        linear=Linear(config.d_model, config.d_model, init=make.init),
        norm=make.norm(),
        bias=make.init.zeros((config.vocab_size,)),
        activation=config.masked_lm_activation,
    )
