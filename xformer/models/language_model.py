"""The decoder-only Transformer (Radford et al., 2018)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xformer import masks, native
from xformer.backends import Array, array_namespace, device
from xformer.config import check_count
from xformer.errors import ConfigError
from xformer.layers import Embedding, EncoderLayer, InputEmbedding, Linear, SharedNormEncoderLayer
from xformer.layers.basic import Norm
from xformer.layers.cache import DecodingCache, last_tokens
from xformer.layers.positions import RelativePositions
from xformer.layers.transformer import carried, final, total
from xformer.models.base import BaseModel, LayerFactory
from xformer.models.config import LanguageModelConfig
from xformer.models.token_ids import as_segment_ids, as_token_ids, ids_of, padding_mask, positions_of, segment_positions
from xformer.random import Rng, split_rng
from xformer.tracing.activations import named
from xformer.tree import check_array


class LanguageModel(BaseModel, init=False):
    """Decoder-only Transformer: predict each token from those before it (Radford et al., 2018).

    Arguments are those of `BaseModel`.

    Examples:
        >>> config = LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=1)
        >>> model = LanguageModel(config)
        >>> model([[5, 4, 7]]).shape
        (1, 3, 13)
    """

    config_class = LanguageModelConfig

    __activations__ = ("embeddings", "states", "logits")

    embedding: Embedding
    layers: tuple[EncoderLayer | SharedNormEncoderLayer, ...]
    norm: Norm | None
    output: Linear | None
    output_bias: Array | None
    input: InputEmbedding
    positions: RelativePositions | None
    local_positions: RelativePositions | None
    config: LanguageModelConfig

    def _build(self, make: LayerFactory) -> None:
        config, init = self.config, make.init
        self.embedding = make.embedding(config.vocab_size)
        self.layers = tuple(make.encoder_layer(i) for i in range(config.num_layers))
        self.norm = make.final_norm()
        has_matrix = config.has_output and not config.tie_output
        self.output = Linear(config.d_model, config.vocab_size, bias=False, init=init) if has_matrix else None
        self.output_bias = init.zeros((config.vocab_size,)) if config.output_bias else None
        self.input = make.input_embedding()
        self.positions = make.relative_positions(bidirectional=not config.causal)
        self.local_positions = make.local_positions()

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.config.vocab_size

    def __call__(
        self, tokens: Any, *, mask: Array | None = None, segment_ids: Any = None, rng: Rng | None = None
    ) -> Array:
        """Compute the logits of the token that follows each token.

        Args:
            tokens: Ids (batch, length), as an array of the model's library, a NumPy array or nested lists. Or floating
                one-hot rows (batch, length, vocab_size).
            mask: Boolean, True = may attend; broadcastable to (batch, heads, length, length). Default: tokens other
                than pad_id; if pad_id is None or equal to bos_id or eos_id, all tokens (right padding needs no mask,
                if attention is causal). With a mask, positions are counted from the first column.
            segment_ids: Integers (batch, length), the index of the document of each token, for rows that hold several
                documents one after the other: tokens attend to their own document, and positions count from its first
                token. No token is padding then; padding after the last document has another index.
            rng: Draws dropout; None switches it off.

        Returns:
            Logits of shape (batch, length, vocab_size).

        Raises:
            DataError: For ids out of range, and for a document that is interrupted by another.
            ShapeError: For other ranks.
            BackendError: For an array of another library.
        """
        return self._logits(self._apply(tokens, mask, segment_ids, rng))

    def states(
        self, tokens: Any, *, mask: Array | None = None, segment_ids: Any = None, rng: Rng | None = None
    ) -> Array:
        """Compute the states that the logits are computed from, (batch, length, d_model); arguments as for a call."""
        return self._normalized(self._apply(tokens, mask, segment_ids, rng))

    def _apply(self, tokens: Any, mask: Array | None, segment_ids: Any, rng: Rng | None) -> Any:
        """Compute the output of the last layer; arguments are those of a call."""
        tokens = self.token_ids(tokens)
        input_rng, *layer_rngs = split_rng(rng, 1 + len(self.layers))
        ids = ids_of(tokens)
        pad_id = self.config.padding_id if mask is None and segment_ids is None else None
        positions, lengths = positions_of(ids, pad_id), None
        if segment_ids is not None:
            same = masks.segments(as_segment_ids(segment_ids, ids, self._parameter))
            mask, (positions, lengths) = masks.combine(mask, same), segment_positions(same)
        x = self.input(named(self, "embeddings", self.embedding(tokens)), positions, rng=input_rng)
        mask = padding_mask(ids, pad_id) if mask is None else mask
        # Relative positions depend on distances, which are those within the document.
        options: dict[str, Any] = {"mask": mask, "causal": self.config.causal, "sizes": lengths}
        # A rotation at another position differs in its last bits.
        options["at"] = positions if segment_ids is None or native.is_reproducible() else None
        return self._apply_layers(self.layers, x, positions=self._layer_positions, rngs=layer_rngs, **options)

    def readout(self, x: Array, *, norm: Callable[[Array], Array] | None = None) -> Array:
        """Compute the logits that the final norm and the output projection make of the residual stream.

        Args:
            x: Array of shape (..., d_model), e.g. the recorded output of a layer.
            norm: Function to apply in place of the final norm.

        Returns:
            Logits of shape (..., vocab_size).
        """
        norm = self.norm if norm is None else norm
        return self._unembed(x if norm is None else norm(x))

    def init_cache(self, batch_size: int) -> DecodingCache:
        """Return an empty cache for `decode_step`.

        Args:
            batch_size: Number of rows.

        Raises:
            ConfigError: If batch_size is less than 1.
        """
        check_count("batch_size", batch_size)
        parameter = self._parameter
        xp = array_namespace(parameter)
        vector = xp.zeros((1, self.config.d_model), dtype=parameter.dtype, device=device(parameter))
        return DecodingCache(len(self.layers), like=vector)

    def decode_step(
        self, tokens: Array, cache: DecodingCache, lengths: Array | None = None, *, all_logits: bool = False
    ) -> Array:
        """Compute the logits of the next token, and append new tokens to the cache.

        Args:
            tokens: Ids (rows, new tokens) in the model's library. They are not checked.
            cache: Earlier tokens.
            lengths: Number of tokens of each row, integers (rows,), if they differ: shorter rows end with padding. The
                cache must be empty; `to_static` makes one for further tokens.
            all_logits: Return the logits after each new token; those after the padding of a row have no meaning.

        Returns:
            Logits of shape (rows, vocab_size), or with all_logits (rows, new tokens, vocab_size).
        """
        self.check_generates()
        _, num_tokens = check_array(tokens, "tokens", "rows", "new tokens")
        x = cache.embed(self.input, named(self, "embeddings", self.embedding(tokens)))
        terms = cache.position_terms(self._all_positions, num_tokens, x, lengths)
        options = {id(p): each._asdict() for p, each in zip(self._all_positions, terms, strict=True)}
        mask = cache.mask(num_tokens)
        for layer, each, positions in zip(self.layers, cache.layers, self._layer_positions, strict=True):
            x = layer(carried(x), mask=mask, causal=True, **options.get(id(positions), {}), cache=each.self_attention)
        cache.advance(num_tokens, lengths)
        if all_logits:
            return self._logits(x)
        return self._logits(last_tokens(total(x), lengths))[:, 0, :]

    def to_static(self, cache: DecodingCache, max_length: int) -> DecodingCache:
        """Return a copy of the cache with space for `max_length` tokens, so that every step has the same shapes."""
        return cache.with_capacity(max_length, self.input, self._all_positions)

    def token_ids(self, data: Any) -> Array:
        """Check ids and convert them to the model's library; arguments and errors are those of a call."""
        return as_token_ids(data, "token", self.config.vocab_size, self._parameter)

    @property
    def _all_positions(self) -> list[RelativePositions | None]:
        return [self.positions] if self.local_positions is None else [self.positions, self.local_positions]

    @property
    def _layer_positions(self) -> list[RelativePositions | None]:
        positions = self._positions_of(len(self.layers), self.positions, self.local_positions)
        return [None if i in self.config.layers_without_positions else each for i, each in enumerate(positions)]

    def _normalized(self, x: Any) -> Array:
        return named(self, "states", final(self.norm, x))

    def _logits(self, x: Any) -> Array:
        return named(self, "logits", self._unembed(self._normalized(x)))

    def check_generates(self) -> None:
        """Raise ConfigError if the model cannot generate text: it is not causal, or has no output matrix."""
        if not self.config.causal:
            raise ConfigError(
                "the model is not causal (is_causal is false): its tokens attend to later ones, so it cannot generate "
                "text; use an Embedder, or model.states(tokens)"
            )
        self._check_output()

    def _check_output(self) -> None:
        if not self.config.has_output:
            problem = "the model has no output matrix, as its checkpoint has none"
            raise ConfigError(f"{problem}; use an Embedder, or model.states(tokens)")

    def _unembed(self, x: Array) -> Array:
        """Return the logits of states."""
        self._check_output()
        return self._logits_of(x, self.embedding)
