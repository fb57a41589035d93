"""The decoder-only Transformer (Radford et al., 2018)."""

from __future__ import annotations

from typing import Any

from xformer import masks
from xformer.autodiff import remat
from xformer.backends import Array, Device, DType
from xformer.errors import ConfigError
from xformer.layers import Embedding, EncoderLayer, Initializer, InputEmbedding, Linear
from xformer.layers.normalization import Norm
from xformer.layers.positions import RelativePositions, position_terms
from xformer.models.base import BaseModel
from xformer.models.builder import LayerFactory
from xformer.models.cache import DecodingCache, StaticCache
from xformer.models.config import LanguageModelConfig
from xformer.models.token_ids import as_token_ids, ids_of, positions_of
from xformer.random import Rng


class LanguageModel(BaseModel):
    """Predict each token from those before it.

    >>> import numpy as np
    >>> config = LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=1)
    >>> model = LanguageModel(config, xp=np, seed=0)
    >>> model([[5, 4, 7]]).shape
    (1, 3, 13)
    """

    config_class = LanguageModelConfig

    embedding: Embedding
    layers: tuple[EncoderLayer, ...]
    norm: Norm | None
    output: Linear | None
    output_bias: Array | None
    input: InputEmbedding
    positions: RelativePositions | None
    config: LanguageModelConfig

    def __init__(
        self,
        config: LanguageModelConfig,
        *,
        xp: Any,
        seed: int | Rng = 0,
        dtype: DType | str | None = None,
        device: Device = None,
    ):
        """Make a model with fresh parameters; arguments are those of Transformer."""
        init = Initializer(xp, seed=seed, dtype=dtype, device=device)
        parts = LayerFactory(config, init)
        self.embedding = parts.embedding(config.vocab_size)
        self.layers = tuple(parts.encoder_layer() for _ in range(config.num_layers))
        self.norm = parts.final_norm()
        self.output = None if config.tie_output else Linear(config.d_model, config.vocab_size, bias=False, init=init)
        self.output_bias = init.zeros((config.vocab_size,)) if config.output_bias else None
        self.input = parts.input_embedding()
        self.positions = parts.relative_positions(bidirectional=False)
        self.config = config

    @property
    def vocab_size(self) -> int:
        """How many tokens there are to choose from."""
        return self.config.vocab_size

    def __call__(self, tokens: Any, *, mask: Array | None = None, rng: Rng | None = None) -> Array:
        """Logits of the token that follows each token.

        tokens: ids (batch, length), as arrays of the model's library, NumPy arrays or nested lists, padded with
        pad_id; or floating one-hot rows (batch, length, vocabulary). mask: in place of the padding mask, e.g. where
        pad_id is an ordinary token; True = may attend, broadcastable to (batch, heads, length, length).
        rng: draws dropout; None (the default) switches it off. Returns (batch, length, vocab_size).

        Raises DataError for ids out of range, ShapeError for other ranks, BackendError for another library's array.
        """
        tokens = self.token_ids(tokens)
        input_rng, *layer_rngs = rng.split(1 + len(self.layers)) if rng else (None,) * (1 + len(self.layers))
        ids = ids_of(tokens)
        positions = None
        if mask is None:
            mask, positions = masks.padding(ids, self.config.pad_id), positions_of(ids, self.config.pad_id)
        x = self.input(self.embedding(tokens), positions, rng=input_rng)
        place = position_terms(self.positions, ids.shape[1], ids.shape[1], x)
        for layer, layer_rng in zip(self.layers, layer_rngs, strict=True):
            run = remat(EncoderLayer.__call__) if self.config.rematerialize else EncoderLayer.__call__
            x = run(layer, x, mask=mask, bias=place.bias, rotation=place.rotation, causal=True, rng=layer_rng)
        return self._logits(x)

    def init_cache(self, batch_size: int) -> DecodingCache:
        """An empty cache for so many rows, to be filled by `decode_step`; raises ConfigError for less than one row."""
        if batch_size < 1:
            raise ConfigError(f"batch_size is {batch_size}; expected at least 1")
        return DecodingCache(len(self.layers), like=self.embedding.weight)

    def decode_step(self, tokens: Array, cache: DecodingCache) -> Array:
        """Logits of the next token: (rows, vocab_size).

        tokens: ids (rows, new tokens) in the model's library, which are trusted and not padded; they join the cache.
        """
        new = tokens.shape[1]
        x = cache.embed(self.input, self.embedding(tokens))
        where: dict[str, Any] = {**cache.position_terms(self.positions, new, x)._asdict(), "mask": cache.mask}
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            x = layer(x, **where, causal=True, store=kept.self_attention)
        cache.advance(new)
        return self._logits(x[:, -1:, :])[:, 0, :]

    def to_static(self, cache: DecodingCache, max_length: int) -> StaticCache:
        """Copy the cache into a static cache of `max_length` tokens, so that every step has the same shapes."""
        return StaticCache(cache, max_length, self.input, self.positions)

    def token_ids(self, data: Any) -> Array:
        """Check ids and bring them to the model's library."""
        return as_token_ids(data, "token", self.config.vocab_size, self.embedding.weight)

    def _logits(self, x: Array) -> Array:
        x = x if self.norm is None else self.norm(x)
        logits = self.embedding.unembed(x) if self.output is None else self.output(x)
        return logits if self.output_bias is None else logits + self.output_bias
