"""The encoder-decoder Transformer (Vaswani et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from xformer import masks
from xformer.autodiff import remat
from xformer.backends import Array, Device, DType, array_namespace
from xformer.errors import ConfigError, ShapeError
from xformer.layers import CopyHead, DecoderLayer, Embedding, EncoderLayer, Initializer, InputEmbedding, Linear
from xformer.layers.normalization import Norm
from xformer.layers.positions import RelativePositions, position_terms, remaining_length
from xformer.models.base import BaseModel
from xformer.models.builder import LayerFactory
from xformer.models.cache import DecodingCache, Memory, StaticCache, check_memory
from xformer.models.config import TransformerConfig
from xformer.models.token_ids import as_lengths, as_token_ids, check_rows, ids_of, positions_of
from xformer.random import Rng


class Transformer(BaseModel):
    """Encode a source sentence into a memory, and decode target tokens from it.

    >>> import numpy as np
    >>> config = TransformerConfig(
    ...     source_vocab_size=11,
    ...     target_vocab_size=13,
    ...     d_model=8,
    ...     num_heads=2,
    ...     d_ff=16,
    ...     num_encoder_layers=1,
    ...     num_decoder_layers=1,
    ... )
    >>> model = Transformer(config, xp=np, seed=0)
    >>> model([[5, 4, 2, 0]], [[1, 7, 3]]).shape
    (1, 3, 13)
    """

    config_class = TransformerConfig

    source_embedding: Embedding
    target_embedding: Embedding | None
    encoder: tuple[EncoderLayer, ...]
    decoder: tuple[DecoderLayer, ...]
    encoder_norm: Norm | None
    decoder_norm: Norm | None
    output: Linear | None
    output_bias: Array | None
    encoder_input: InputEmbedding
    decoder_input: InputEmbedding
    encoder_positions: RelativePositions | None
    decoder_positions: RelativePositions | None
    copy_head: CopyHead | None
    config: TransformerConfig

    def __init__(
        self,
        config: TransformerConfig,
        *,
        xp: Any,
        seed: int | Rng = 0,
        dtype: DType | str | None = None,
        device: Device = None,
    ):
        """Make a model with fresh parameters.

        xp: the array library, as a module or by name; seed: the same seed gives the same parameters in every
        library; dtype: of the parameters, default float32; device: as the library names it.
        """
        init = Initializer(xp, seed=seed, dtype=dtype, device=device)
        parts, c = LayerFactory(config, init), config
        decodes = c.num_decoder_layers > 0
        self.source_embedding = parts.embedding(c.source_vocab_size)
        self.target_embedding = parts.embedding(c.target_vocab_size) if decodes and not c.share_embeddings else None
        self.encoder = tuple(parts.encoder_layer() for _ in range(c.num_encoder_layers))
        self.decoder = tuple(parts.decoder_layer() for _ in range(c.num_decoder_layers))
        self.encoder_norm = parts.final_norm()
        self.decoder_norm = parts.final_norm() if decodes else None
        untied = decodes and not c.tie_output
        self.output = Linear(c.d_model, c.target_vocab_size, bias=False, init=init) if untied else None
        self.output_bias = init.zeros((c.target_vocab_size,)) if decodes and c.output_bias else None
        self.encoder_input = parts.input_embedding()
        self.decoder_input = parts.input_embedding()
        self.encoder_positions = parts.relative_positions(bidirectional=True)
        self.decoder_positions = parts.relative_positions(bidirectional=False) if decodes else None
        self.copy_head = CopyHead(c.d_model, init=init) if decodes and c.copy else None
        self.config = config

    @property
    def vocab_size(self) -> int:
        """How many tokens there are to choose from."""
        return self.config.target_vocab_size

    # --- The whole at once: training ----------------------------------------------------------------------------------

    def __call__(self, source: Any, target: Any = None, *, causal: bool = True, rng: Rng | None = None) -> Array:
        """Logits of the token that follows each target token; without a target, the memory.

        source: (batch, source length), target: (batch, target length): ids as arrays of the model's library, NumPy
        arrays or nested lists, padded with pad_id; or floating one-hot rows (batch, length, vocabulary).
        causal: False lets target tokens see later ones. rng: draws dropout; None (the default) switches it off.
        Returns (batch, target length, target_vocab_size), or the memory (batch, source length, d_model).

        Raises DataError for bad ids, ShapeError for other ranks or unequal batches, BackendError for another library's.
        """
        encode_rng, decode_rng = rng.split(2) if rng else (None, None)
        source = self.source_ids(source)
        if target is None:
            return self._encode(source, encode_rng)
        target = self.target_ids(target)
        check_rows(source, target)
        memory = self._encode(source, encode_rng)
        return self._decode(target, memory, source, causal=causal, rng=decode_rng)

    def encode(self, source: Any, *, rng: Rng | None = None) -> Array:
        """source: ids (batch, source length) -> memory (batch, source length, d_model)."""
        return self._encode(self.source_ids(source), rng)

    def decode(
        self,
        target: Any,
        memory: Array,
        *,
        source: Any = None,
        lengths: Any = None,
        causal: bool = True,
        rng: Rng | None = None,
    ) -> Array:
        """Logits from a memory.

        target: ids (batch, target length); memory: (batch, source length, d_model); source: the ids the memory was
        made from, to mask its padding (None: nothing was padded); lengths: (batch,) tokens of the whole output, eos
        included, for models with a length encoding (None: as many as target has); causal: False lets target tokens
        see later ones. Returns (batch, target length, target_vocab_size).
        """
        target = self.target_ids(target)
        check_memory(memory, target, self.config.d_model)
        source = None if source is None else self.source_ids(source)
        if source is not None and tuple(source.shape[:2]) != tuple(memory.shape[:2]):
            raise ShapeError(
                f"source ids have shape {tuple(source.shape)}; expected {tuple(memory.shape[:2])}, as the memory has"
            )
        lengths = self._lengths(lengths, target.shape[0])
        return self._decode(target, memory, source, lengths=lengths, causal=causal, rng=rng)

    def _encode(self, source: Array, rng: Rng | None = None) -> Array:
        input_rng, *layer_rngs = rng.split(1 + len(self.encoder)) if rng else (None,) * (1 + len(self.encoder))
        ids = ids_of(source)
        mask = masks.padding(ids, self.config.pad_id)
        x = self.source_embedding(source)
        x = self.encoder_input(x, positions_of(ids, self.config.pad_id), rng=input_rng)
        place = position_terms(self.encoder_positions, ids.shape[1], ids.shape[1], x)
        for layer, layer_rng in zip(self.encoder, layer_rngs, strict=True):
            x = self._run(layer)(x, mask=mask, bias=place.bias, rotation=place.rotation, rng=layer_rng)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def _decode(
        self,
        target: Array,
        memory: Array,
        source: Array | None,
        *,
        lengths: Array | None = None,
        causal: bool = True,
        rng: Rng | None = None,
    ) -> Array:
        input_rng, *layer_rngs = rng.split(1 + len(self.decoder)) if rng else (None,) * (1 + len(self.decoder))
        ids, pad_id = ids_of(target), self.config.pad_id
        source = None if source is None else ids_of(source)
        mask = masks.padding(ids, pad_id)
        memory_mask = None if source is None else masks.padding(source, pad_id)
        x = self._target_input(target, lengths, rng=input_rng)
        place = position_terms(self.decoder_positions, ids.shape[1], ids.shape[1], x)
        where: dict[str, Any] = {"mask": mask, "memory_mask": memory_mask, "causal": causal, **place._asdict()}
        for layer, layer_rng in zip(self.decoder, layer_rngs, strict=True):
            x = self._run(layer)(x, memory, **where, rng=layer_rng)
        return self._logits(x, Memory(memory, source, memory_mask, lengths))

    def _run(self, layer: EncoderLayer | DecoderLayer) -> Callable[..., Array]:
        """The layer as a function, which forgets what it computed where the configuration says so."""
        if not self.config.rematerialize:
            return layer
        run = remat(type(layer).__call__)
        return lambda *args, **keywords: run(layer, *args, **keywords)

    # --- Token by token: decoding -------------------------------------------------------------------------------------

    def prefill(self, source: Any, *, lengths: Sequence[int] | None = None) -> DecodingCache:
        """Encode sentences, to be decoded by `decode_step`.

        source: ids (sentences, source length); lengths: tokens of the output that is wanted of each, eos included, for
        models with a length encoding. Raises ConfigError for a model that has no decoder, or needs lengths.
        """
        if not self.decoder:
            raise ConfigError("this model has no decoder (num_decoder_layers is 0); it can only encode")
        if self.config.length_encoding and lengths is None:
            raise ConfigError("this model has a length encoding; give the lengths of its outputs")
        tokens = self.source_ids(source)
        ids = ids_of(tokens)
        states = self._encode(tokens)
        memory = Memory(states, ids, masks.padding(ids, self.config.pad_id), self._lengths(lengths, ids.shape[0]))
        memory.copy_key = None if self.copy_head is None else self.copy_head.key(states)
        cache = DecodingCache(len(self.decoder), like=states, memory=memory)
        for layer, kept in zip(self.decoder, cache.layers, strict=True):
            kept.cross_attention.append(*layer.cross_attention.keys_and_values(states))
        return cache

    def decode_step(self, tokens: Array, cache: DecodingCache) -> Array:
        """Logits of the next token: (rows, target_vocab_size).

        tokens: ids (rows, new tokens) in the model's library, which are trusted; they join the cache.
        """
        memory, (rows, new) = cache.memory, tokens.shape
        if memory is None:
            raise ConfigError("the cache has no memory; expected one that prefill() of this model made")
        x = self._target_table()(tokens)
        if memory.lengths is not None:
            lengths = array_namespace(tokens).repeat(memory.lengths, rows // memory.lengths.shape[0])
            x = x + remaining_length(lengths[:, None] - cache.numbers(new, lengths), self.config.d_model, x.dtype)
        x = cache.embed(self.decoder_input, x)
        where: dict[str, Any] = {**cache.position_terms(self.decoder_positions, new, x)._asdict(), "mask": cache.mask}
        for layer, kept in zip(self.decoder, cache.layers, strict=True):
            x = layer.decode_step(x, kept, memory_mask=memory.mask, **where)
        cache.advance(new)
        return self._logits(x[:, -1:, :], memory)[:, 0, :]

    def to_static(self, cache: DecodingCache, max_length: int) -> StaticCache:
        """Copy the cache into a static cache of `max_length` tokens, so that every step has the same shapes."""
        return StaticCache(cache, max_length, self.decoder_input, self.decoder_positions)

    def cross_attention_weights(self, source: Any, target: Any, *, lengths: Any = None) -> list[Array]:
        """How each target token attends to the source, to look at: per layer (batch, heads, target, source).

        lengths: as for `decode`.
        """
        source, target = ids_of(self.source_ids(source)), ids_of(self.target_ids(target))
        memory, found = self._encode(source), []
        lengths = self._lengths(lengths, target.shape[0])
        mask, memory_mask = (masks.padding(ids, self.config.pad_id) for ids in (target, source))
        x = self._target_input(target, lengths)
        place = position_terms(self.decoder_positions, target.shape[1], target.shape[1], x)
        where: dict[str, Any] = {"mask": mask, "memory_mask": memory_mask, **place._asdict()}
        for layer in self.decoder:
            found.append(layer.cross_attention_weights(x, memory, **where))
            x = layer(x, memory, **where)
        return found

    # --- Parts of the above -------------------------------------------------------------------------------------------

    def source_ids(self, data: Any) -> Array:
        """Check source ids and bring them to the model's library."""
        return as_token_ids(data, "source", self.config.source_vocab_size, self.source_embedding.weight)

    def target_ids(self, data: Any) -> Array:
        """Check target ids and bring them to the model's library; raises ConfigError without a decoder."""
        if not self.decoder:
            raise ConfigError("this model has no decoder (num_decoder_layers is 0); call it with a source alone")
        return as_token_ids(data, "target", self.config.target_vocab_size, self.source_embedding.weight)

    def _lengths(self, lengths: Any, sentences: int) -> Array | None:
        """Wanted lengths where the model is; raises ConfigError for a model that sees none."""
        if lengths is not None and not self.config.length_encoding:
            raise ConfigError("this model has no length encoding; leave lengths out")
        return None if lengths is None else as_lengths(lengths, sentences, self.source_embedding.weight)

    def _target_table(self) -> Embedding:
        return self.source_embedding if self.target_embedding is None else self.target_embedding

    def _target_input(self, target: Array, lengths: Array | None = None, rng: Rng | None = None) -> Array:
        """What the first decoder layer gets: (batch, length, d_model); lengths as for `decode`."""
        ids = ids_of(target)
        positions = positions_of(ids, self.config.pad_id)
        x = self._target_table()(target)
        if self.config.length_encoding:
            xp = array_namespace(ids)
            if lengths is None:
                # The bos that is in counts for the eos that is not.
                lengths = xp.sum(xp.astype(ids != self.config.pad_id, ids.dtype), axis=1)
            x = x + remaining_length(xp.expand_dims(lengths, axis=1) - positions, self.config.d_model, x.dtype)
        return self.decoder_input(x, positions, rng=rng)

    def _logits(self, x: Array, memory: Memory) -> Array:
        """Logits of the decoder's states; with a copy head, log-probabilities."""
        x = x if self.decoder_norm is None else self.decoder_norm(x)
        logits = self._target_table().unembed(x) if self.output is None else self.output(x)
        logits = logits if self.output_bias is None else logits + self.output_bias
        if self.copy_head is None:
            return logits
        if memory.ids is None:
            raise ConfigError("this model copies from the source; pass source=, the ids that the memory was made from")
        return self.copy_head(x, logits, memory.states, memory.ids, memory.mask, memory.copy_key)
