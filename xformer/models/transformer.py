"""The encoder-decoder Transformer (Vaswani et al., 2017), and the one whose source is audio (Radford et al., 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from xformer import layers
from xformer.backends import Array, array_namespace, from_host, is_floating
from xformer.errors import ConfigError, ShapeError, describe_type
from xformer.layers.basic import Norm, as_dtype_of
from xformer.layers.cache import DecodingCache, Memory, last_tokens
from xformer.layers.positions import RelativePositions, remaining_length
from xformer.layers.transformer import carried, final, total
from xformer.models.base import BaseModel, LayerFactory
from xformer.models.config import SpeechTransformerConfig, TransformerConfig
from xformer.models.encoder import Encoder
from xformer.models.language_model import LanguageModel
from xformer.models.token_ids import as_lengths, as_token_ids, check_padding_mask, ids_of, padding_mask, positions_of
from xformer.random import Rng, split_rng
from xformer.tracing.activations import named, record
from xformer.tree import check_array, is_array, wrong_array

Positions = RelativePositions | tuple[RelativePositions | None, ...] | None


class Transformer(BaseModel, init=False):
    """Encoder-decoder Transformer: encode a source into a memory and decode a target from it (Vaswani et al., 2017).

    Padding is inferred from pad_id, on either side. If pad_id is None or eos_id (in targets also bos_id), no token
    counts as padding: pass `source_mask`; targets padded on the right need no mask, as the decoder is causal.

    Arguments are those of `BaseModel`.

    Examples:
        >>> config = TransformerConfig(
        ...     source_vocab_size=11,
        ...     target_vocab_size=13,
        ...     d_model=8,
        ...     num_heads=2,
        ...     d_ff=16,
        ...     num_encoder_layers=1,
        ...     num_decoder_layers=1,
        ... )
        >>> model = Transformer(config)
        >>> model([[5, 4, 2, 0]], [[1, 7, 3]]).shape
        (1, 3, 13)
    """

    config_class = TransformerConfig

    __activations__ = ("source_embeddings", "memory", "target_embeddings", "states", "logits")

    source_embedding: layers.Embedding
    target_embedding: layers.Embedding | None
    encoder: tuple[layers.EncoderLayer | layers.SharedNormEncoderLayer, ...]
    decoder: tuple[layers.DecoderLayer, ...]
    encoder_norm: Norm | None
    decoder_norm: Norm | None
    output: layers.Linear | None
    output_bias: Array | None
    encoder_input: layers.InputEmbedding
    decoder_input: layers.InputEmbedding
    encoder_positions: Positions
    decoder_positions: Positions
    copy_head: layers.CopyHead | None
    config: TransformerConfig

    def _build(self, make: LayerFactory) -> None:
        c, init = self.config, make.init
        has_decoder = c.num_decoder_layers > 0
        self.source_embedding = self._make_source_embedding(make)
        has_table = has_decoder and not c.share_embeddings
        self.target_embedding = make.embedding(c.target_vocab_size) if has_table else None
        self.encoder = tuple(make.encoder_layer(i) for i in range(c.num_encoder_layers))
        self.decoder = tuple(make.decoder_layer(i) for i in range(c.num_decoder_layers))
        self.encoder_norm = make.final_norm()
        self.decoder_norm = make.final_norm() if has_decoder else None
        untied = has_decoder and not c.tie_output
        self.output = layers.Linear(c.d_model, c.target_vocab_size, bias=False, init=init) if untied else None
        self.output_bias = init.zeros((c.target_vocab_size,)) if has_decoder and c.output_bias else None
        self.encoder_input = self._make_encoder_input(make)
        self.decoder_input = make.input_embedding(norm_first=c.decoder_norm_before_positions)
        self.encoder_positions = _positions(make, c, c.num_encoder_layers, bidirectional=True)
        self.decoder_positions = _positions(make, c, c.num_decoder_layers, bidirectional=False) if has_decoder else None
        self.copy_head = layers.CopyHead(c.d_model, init=init) if has_decoder and c.copy else None

    def _make_source_embedding(self, make: LayerFactory) -> layers.Embedding:
        return make.embedding(self.config.source_vocab_size)

    def _make_encoder_input(self, make: LayerFactory) -> layers.InputEmbedding:
        return make.input_embedding()

    @property
    def vocab_size(self) -> int:
        """Number of target tokens."""
        return self.config.target_vocab_size

    # --- Whole sequences: training and scoring ------------------------------------------------------------------------

    def __call__(
        self,
        source: Any,
        target: Any = None,
        *,
        source_mask: Array | None = None,
        causal: bool = True,
        rng: Rng | None = None,
    ) -> Array:
        """Compute the logits of the token that follows each target token; without a target, the memory.

        Args:
            source: Ids (batch, source length), as an array of the model's library, a NumPy array or nested lists. Or
                floating one-hot rows (batch, source length, source_vocab_size).
            target: Ids (batch, target length) or one-hot rows, starting with bos_id.
            source_mask: Boolean (batch, 1, 1, source length), True = a token, False = padding; default: ids other than
                pad_id. With a mask, positions are counted from the first column.
            causal: False lets target tokens attend to later ones.
            rng: Draws dropout; None switches it off.

        Returns:
            Logits (batch, target length, target_vocab_size), or the memory (batch, source length, d_model).

        Raises:
            DataError: For ids out of range.
            ShapeError: For other ranks or unequal batch sizes.
            BackendError: For an array of another library.
        """
        encode_rng, decode_rng = split_rng(rng, 2)
        source = self.source_ids(source)
        if target is None:
            return self._encode(source, source_mask, encode_rng).states
        target = self.target_ids(target)
        if (rows := source.shape[0]) != target.shape[0]:  # a single row would be broadcast silently
            raise ShapeError(f"source has {rows} rows and target {target.shape[0]}; expected equal batch sizes")
        return self._decode(target, self._encode(source, source_mask, encode_rng), causal=causal, rng=decode_rng)

    def encode(self, source: Any, *, source_mask: Array | None = None, rng: Rng | None = None) -> Array:
        """Encode a source into the memory, (batch, source length, d_model); arguments are those of a call."""
        return self._encode(self.source_ids(source), source_mask, rng).states

    def decode(
        self,
        target: Any,
        memory: Array,
        *,
        source: Any = None,
        source_mask: Array | None = None,
        lengths: Any = None,
        causal: bool = True,
        rng: Rng | None = None,
    ) -> Array:
        """Compute logits from a memory.

        Args:
            target: Ids (batch, target length) or one-hot rows.
            memory: Output of `encode`, (batch, source length, d_model).
            source: Source ids of the memory, to mask their padding and for a copy head. None: nothing is masked.
            source_mask: Boolean (batch, 1, 1, source length); default: source ids other than pad_id.
            lengths: Output lengths in tokens, eos included, integers (batch,), for models with a length encoding;
                default: the lengths of the targets.
            causal: False lets target tokens attend to later ones.
            rng: Draws dropout; None switches it off.

        Returns:
            Logits of shape (batch, target length, target_vocab_size).
        """
        target = self.target_ids(target)
        check_array(memory, "memory", target.shape[0], "source length", self.config.d_model)
        state = Memory(as_dtype_of(memory, self._parameter), None, source_mask, None)
        if source is not None:
            state.ids = ids_of(self.source_ids(source))
            if tuple(state.ids.shape) != tuple(memory.shape[:2]):
                raise wrong_array(state.ids, "source ids have", f"shape {tuple(memory.shape[:2])}, as the memory has")
            state.mask = self._source_mask(state.ids, source_mask)
        state.lengths = self._lengths(lengths, target.shape[0])
        return self._decode(target, state, causal=causal, rng=rng)

    def cross_attention_weights(
        self, source: Any, target: Any, *, source_mask: Array | None = None, lengths: Any = None
    ) -> list[Array]:
        """Return the cross-attention weights of each layer, for inspection.

        Args:
            source: Ids (batch, source length).
            target: Ids (batch, target length), starting with bos_id.
            source_mask: As for a call.
            lengths: As for `decode`.

        Returns:
            One array (batch, heads, target length, source length) per layer.
        """
        source, target = self.source_ids(source), self.target_ids(target)
        memory = self._encode(source, source_mask)
        memory.lengths = self._lengths(lengths, target.shape[0])
        with record(self, "decoder.*.cross_attention.weights") as recorded:
            self._decode(target, memory)
        return list(recorded.values())

    def _encode(self, source: Array, mask: Array | None, rng: Rng | None = None) -> Memory:
        ids = ids_of(source)
        positions = positions_of(ids, self.config.source_padding_id) if mask is None else None
        memory = self._encode_vectors(self.source_embedding(source), positions, self._source_mask(ids, mask), rng)
        memory.ids = ids
        return memory

    def _encode_vectors(self, x: Array, positions: Array | None, mask: Array | None, rng: Rng | None) -> Memory:
        """Apply the encoder to source vectors (batch, source length, d_model)."""
        input_rng, *layer_rngs = split_rng(rng, 1 + len(self.encoder))
        x = self.encoder_input(named(self, "source_embeddings", x), positions, rng=input_rng)
        of_layers = _as_tuple(self.encoder_positions)
        x = self._apply_layers(self.encoder, x, positions=of_layers, at=positions, rngs=layer_rngs, mask=mask)
        return Memory(named(self, "memory", final(self.encoder_norm, x)), None, mask, None)

    def _decode(self, target: Array, memory: Memory, *, causal: bool = True, rng: Rng | None = None) -> Array:
        input_rng, *layer_rngs = split_rng(rng, 1 + len(self.decoder))
        x, positions, mask = self._decoder_inputs(target, memory, input_rng)
        options: dict[str, Any] = {"at": positions, "mask": mask, "memory_mask": memory.mask, "causal": causal}
        x = self._apply_layers(
            self.decoder, x, memory.states, positions=self._all_positions, rngs=layer_rngs, **options
        )
        return self._logits(x, memory)

    def _decoder_inputs(self, target: Array, memory: Memory, rng: Rng | None) -> tuple[Array, Any, Array | None]:
        """Return the input of the first decoder layer, the positions of tokens, and the mask of self-attention."""
        ids, pad_id = ids_of(target), self.config.padding_id
        positions = positions_of(ids, pad_id)
        x = named(self, "target_embeddings", self._target_table()(target))
        if positions is not None and self.config.length_encoding:
            xp, lengths = array_namespace(ids), memory.lengths
            if lengths is None:
                # The bos of the inputs makes up for their missing eos.
                lengths = xp.sum(xp.astype(ids != pad_id, ids.dtype), axis=1)
            x = x + remaining_length(xp.expand_dims(lengths, axis=1) - positions, self.config.d_model, x.dtype)
        return self.decoder_input(x, positions, rng=rng), positions, padding_mask(ids, pad_id)

    # --- Token by token: decoding -------------------------------------------------------------------------------------

    def prefill(
        self, source: Any, *, lengths: Sequence[int] | None = None, source_mask: Array | None = None
    ) -> DecodingCache:
        """Encode sources and return the cache for `decode_step`.

        Args:
            source: Ids (inputs, source length).
            lengths: Requested output lengths in tokens, eos included, for models with a length encoding.
            source_mask: As for a call.

        Raises:
            ConfigError: If the model has no decoder, or a length encoding and `lengths` is None.
        """
        if not self.decoder:
            raise ConfigError("this model has no decoder (num_decoder_layers is 0); it can only encode")
        if self.config.length_encoding and lengths is None:
            raise ConfigError("this model has a length encoding; expected lengths, one per source")
        memory = self._encode(self.source_ids(source), source_mask)
        memory.lengths = self._lengths(lengths, memory.states.shape[0])
        memory.copy_key = None if self.copy_head is None else self.copy_head.key(memory.states)
        cache = DecodingCache(len(self.decoder), like=memory.states, memory=memory)
        for layer, layer_cache in zip(self.decoder, cache.layers, strict=True):
            layer_cache.cross_attention.append(*layer.cross_attention.keys_and_values(memory.states))
        return cache

    def decode_step(
        self, tokens: Array, cache: DecodingCache, lengths: Array | None = None, *, all_logits: bool = False
    ) -> Array:
        """Compute the logits of the next token, and append new tokens to the cache.

        Args:
            tokens: Ids (rows, new tokens) in the model's library. They are not checked.
            cache: Earlier tokens, and the memory.
            lengths: Number of tokens of each row, integers (rows,), if they differ: shorter rows end with padding. The
                cache must have no tokens; `to_static` makes one for further tokens.
            all_logits: Return the logits after each new token; those after the padding of a row have no meaning.

        Returns:
            Logits of shape (rows, target_vocab_size), or with all_logits (rows, new tokens, target_vocab_size).

        Raises:
            ConfigError: If the cache has no memory.
        """
        memory, (rows, num_tokens) = cache.memory, tokens.shape
        if memory is None:
            raise ConfigError("the cache has no memory; expected a cache made by prefill() of this model")
        x = named(self, "target_embeddings", self._target_table()(tokens))
        if memory.lengths is not None:
            outputs = array_namespace(tokens).repeat(memory.lengths, rows // memory.lengths.shape[0])
            remaining = outputs[:, None] - cache.positions(num_tokens, outputs)
            x = x + remaining_length(remaining, self.config.d_model, x.dtype)
        x = cache.embed(self.decoder_input, x)
        terms = cache.position_terms(self._all_positions, num_tokens, x, lengths)
        options: dict[str, Any] = {"mask": cache.mask(num_tokens), "memory_mask": memory.mask}
        for i, (layer, layer_cache) in enumerate(zip(self.decoder, cache.layers, strict=True)):
            x = layer.decode_step(carried(x), layer_cache, **options, **terms[i % len(terms)]._asdict())
        cache.advance(num_tokens, lengths)
        if all_logits:
            return self._logits(x, memory)
        return self._logits(last_tokens(total(x), lengths), memory)[:, 0, :]

    def to_static(self, cache: DecodingCache, max_length: int) -> DecodingCache:
        """Return a copy of the cache with space for `max_length` tokens, so that every step has the same shapes."""
        return cache.with_capacity(max_length, self.decoder_input, self._all_positions)

    @property
    def _all_positions(self) -> Sequence[RelativePositions | None]:
        """Relative positions of the decoder: one for each layer, or one for all layers."""
        return _as_tuple(self.decoder_positions)

    # --- Inputs and outputs -------------------------------------------------------------------------------------------

    def source_ids(self, data: Any) -> Array:
        """Check source ids and convert them to the model's library; arguments and errors are those of a call."""
        return as_token_ids(data, "source", self.config.source_vocab_size, self._parameter)

    def target_ids(self, data: Any) -> Array:
        """Check target ids and convert them to the model's library.

        Raises:
            ConfigError: If the model has no decoder. Other errors are those of a call.
        """
        if not self.decoder:
            raise ConfigError("this model has no decoder (num_decoder_layers is 0); call it with a source alone")
        return as_token_ids(data, "target", self.config.target_vocab_size, self._parameter)

    def _source_mask(self, ids: Array, mask: Array | None) -> Array | None:
        """Return the padding mask of the source, (batch, 1, 1, source length)."""
        if mask is not None:
            return check_padding_mask(mask, ids, "source_mask")
        return padding_mask(ids, self.config.source_padding_id)

    def _lengths(self, lengths: Any, batch: int) -> Array | None:
        """Return requested lengths in the model's library; raise ConfigError if the model has no length encoding."""
        if lengths is not None and not self.config.length_encoding:
            raise ConfigError("lengths was passed to a model without a length encoding; expected None")
        return None if lengths is None else as_lengths(lengths, batch, self._parameter)

    def _target_table(self) -> layers.Embedding:
        return self.source_embedding if self.target_embedding is None else self.target_embedding

    def readout(self, x: Array) -> Array:
        """Compute the logits that the final norm and the output projection make of the decoder's residual stream.

        Args:
            x: Array of shape (..., d_model), e.g. the recorded output of a decoder layer.

        Returns:
            Logits of shape (..., target_vocab_size), without the part of a copy head.
        """
        return self._unembed(x if self.decoder_norm is None else self.decoder_norm(x))

    def _unembed(self, x: Array) -> Array:
        """Return the logits of states after the final norm."""
        return self._logits_of(x, self._target_table())

    def _logits(self, x: Any, memory: Memory) -> Array:
        """Return the logits of decoder states; with a copy head, log-probabilities."""
        x = named(self, "states", final(self.decoder_norm, x))
        logits = self._unembed(x)
        if self.copy_head is not None:
            if memory.ids is None:
                raise ConfigError("this model copies from the source; pass source=, the ids of the memory")
            logits = self.copy_head(x, logits, memory.states, memory.ids, memory.mask, memory.copy_key)
        return named(self, "logits", logits)


class SpeechTransformer(Transformer, init=False):
    """Encoder-decoder Transformer whose source is a spectrogram (Radford et al., 2023).

    Two convolutions halve the number of frames. Everything else is a `Transformer`, and calls, `encode`, `decode` and
    `generate` take the same arguments, with these sources:

    - `source`: floating frames (batch, frames, source_vocab_size), e.g. of `xformer.data.audio.log_mel_spectrogram`.
    - `source_mask`: boolean (batch, 1, 1, (frames + 1) // 2), True = audio, False = padding. Default: all is audio.

    Arguments are those of `BaseModel`.

    Examples:
        >>> import numpy as np
        >>> config = SpeechTransformerConfig(
        ...     source_vocab_size=5,
        ...     target_vocab_size=13,
        ...     d_model=8,
        ...     num_heads=2,
        ...     d_ff=16,
        ...     num_encoder_layers=1,
        ...     num_decoder_layers=1,
        ... )
        >>> model = SpeechTransformer(config)
        >>> model(np.zeros((1, 10, 5), dtype=np.float32), [[1, 7, 3]]).shape
        (1, 3, 13)
    """

    config_class = SpeechTransformerConfig

    source_embedding: layers.AudioEmbedding  # type: ignore[assignment]
    config: SpeechTransformerConfig

    def source_ids(self, data: Any) -> Array:
        """Check frames and convert them to the model's library; arguments are those of a call.

        Raises:
            ShapeError: Unless the frames are floating, (batch, frames, source_vocab_size).
        """
        data = data if is_array(data) else from_host(np, data)
        features = self.config.source_vocab_size
        if not is_floating(data.dtype) or len(data.shape) != 3 or data.shape[2] != features or data.shape[1] == 0:
            raise wrong_array(data, "source has", f"floating frames (batch, frames, {features})")
        return as_token_ids(data, "source", features, self._parameter)

    def _make_source_embedding(self, make: LayerFactory) -> layers.AudioEmbedding:  # type: ignore[override]
        return layers.AudioEmbedding(self.config.source_vocab_size, self.config.d_model, init=make.init)

    def _make_encoder_input(self, make: LayerFactory) -> layers.InputEmbedding:
        return make.input_embedding(self.config.max_source_positions)

    def _encode(self, source: Array, mask: Array | None, rng: Rng | None = None) -> Memory:
        x = self.source_embedding(source)
        mask = None if mask is None else check_padding_mask(mask, x, "source_mask")
        return self._encode_vectors(x, None, mask, rng)


def _positions(make: LayerFactory, config: TransformerConfig, num_layers: int, *, bidirectional: bool) -> Positions:
    """Make the relative positions of a stack: those of all layers, or a tuple of those of each one if they differ."""
    if not config.share_relative_bias:
        return tuple(make.relative_positions(bidirectional=bidirectional) for _ in range(num_layers))
    shared, local = make.relative_positions(bidirectional=bidirectional), make.local_positions()
    if local is None or config.window is None:
        return shared
    return tuple(shared if config.window_of(i) is None else local for i in range(num_layers))


def _as_tuple(positions: Positions) -> tuple[RelativePositions | None, ...]:
    return positions if isinstance(positions, tuple) else (positions,)


# --- Attention weights of all layers, for inspection ------------------------------------------------------------------


def attention_maps(model: BaseModel, *inputs: Any, **options: Any) -> dict[str, list[Array]]:
    """Call a model and return the attention weights of all its layers.

    Args:
        model: Encoder-decoder, language model or encoder.
        *inputs: Arguments of the model: ids (batch, length), for an encoder-decoder those of source and target.
        **options: Further arguments of the model.

    Returns:
        Weights by part: "encoder" and "decoder" (self-attention) and "cross". Each is a list with one array
        (batch, heads, queries, keys) per layer. A language model has "decoder" only, an encoder "encoder" only.

    Raises:
        ConfigError: For a model of another class.

    Examples:
        >>> from xformer.models import LanguageModelConfig
        >>> config = LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=3)
        >>> maps = attention_maps(LanguageModel(config), [[5, 4, 7]])
        >>> print(*(weights.shape for weights in maps["decoder"]))
        (1, 2, 3, 3) (1, 2, 3, 3) (1, 2, 3, 3)
    """
    parts = {"encoder": "encoder.*.self_*", "decoder": "decoder.*.self_*", "cross": "decoder.*.cross_*"}
    if not isinstance(model, Transformer):
        if not isinstance(model, LanguageModel | Encoder):
            raise ConfigError(f"model is {describe_type(model)}; expected a Transformer, LanguageModel or Encoder")
        parts = {"decoder" if isinstance(model, LanguageModel) else "encoder": "layers.*.self_*"}
    with record(model, "*attention.weights") as recorded:
        model(*inputs, **options)
    return {part: [x for name, x in recorded.items() if fnmatchcase(name, pattern)] for part, pattern in parts.items()}
