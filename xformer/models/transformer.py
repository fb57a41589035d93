"""The encoder-decoder Transformer (Vaswani et al., 2017)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, Protocol

from xformer import masks
from xformer.errors import CheckpointError, ConfigError, ShapeError
from xformer.layers import DecoderLayer, Dropout, Embedding, EncoderLayer, Initializer, LayerNorm, Linear, sinusoidal
from xformer.layers.decoder import LayerCache
from xformer.models.config import TransformerConfig
from xformer.models.token_ids import as_token_ids
from xformer.namespace import Array, Device, DType, array_namespace, device, dtype_name
from xformer.random import Rng
from xformer.storage import load_arrays, place, restorable_dtype, save_arrays
from xformer.tree import Module, replace


class Cache(Protocol):
    """What generation keeps of the tokens decoded so far."""

    @property
    def length(self) -> int:
        """How many tokens they are."""

    @property
    def layers(self) -> Sequence[LayerCache]:
        """The stores of each decoder layer."""


class Transformer(Module):
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

    source_embedding: Embedding
    target_embedding: Embedding | None
    encoder: tuple[EncoderLayer, ...]
    decoder: tuple[DecoderLayer, ...]
    encoder_norm: LayerNorm | None
    decoder_norm: LayerNorm | None
    output: Linear | None
    output_bias: Array | None
    dropout: Dropout
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
        c = config
        part: dict[str, Any] = {
            "dropout": c.dropout,
            "attention_dropout": c.attention_dropout,
            "activation_dropout": c.activation_dropout,
            "activation": c.activation,
            "pre_norm": c.norm_position == "pre",
            "attention_bias": c.attention_bias,
            "epsilon": c.norm_epsilon,
            "init": init,
        }
        sizes = (c.d_model, c.num_heads, c.d_ff)
        self.source_embedding = Embedding(c.source_vocab_size, c.d_model, scale=c.scale_embeddings, init=init)
        self.target_embedding = (
            None
            if c.share_embeddings
            else Embedding(c.target_vocab_size, c.d_model, scale=c.scale_embeddings, init=init)
        )
        self.encoder = tuple(EncoderLayer(*sizes, **part) for _ in range(c.num_encoder_layers))
        self.decoder = tuple(DecoderLayer(*sizes, **part) for _ in range(c.num_decoder_layers))
        # A pre-norm stack ends with a sum that no norm has seen yet.
        pre_norm = c.norm_position == "pre"
        self.encoder_norm = LayerNorm(c.d_model, epsilon=c.norm_epsilon, init=init) if pre_norm else None
        self.decoder_norm = LayerNorm(c.d_model, epsilon=c.norm_epsilon, init=init) if pre_norm else None
        self.output = None if c.tie_output else Linear(c.d_model, c.target_vocab_size, bias=False, init=init)
        self.output_bias = init.zeros((c.target_vocab_size,)) if c.output_bias else None
        self.dropout = Dropout(c.dropout)
        self.config = config

    def __call__(self, source: Any, target: Any, *, rng: Rng | None = None) -> Array:
        """Logits of the token that follows each target token.

        source: (batch, source length), target: (batch, target length): ids as arrays of the model's library, NumPy
        arrays or nested lists, padded with pad_id. rng: draws dropout; None (the default) switches it off.
        Returns (batch, target length, target_vocab_size).

        Raises DataError for ids out of range, ShapeError for other ranks, BackendError for another library's array.
        """
        encode_rng, decode_rng = rng.split(2) if rng else (None, None)
        source = self.source_ids(source)
        memory = self.encode(source, rng=encode_rng)
        return self.decode(target, memory, source=source, rng=decode_rng)

    def encode(self, source: Any, *, rng: Rng | None = None) -> Array:
        """source: ids (batch, source length) -> memory (batch, source length, d_model)."""
        source = self.source_ids(source)
        embed_rng, *layer_rngs = rng.split(1 + len(self.encoder)) if rng else (None,) * (1 + len(self.encoder))
        mask = masks.padding(source, self.config.pad_id)
        x = self._embed(self.source_embedding, source, 0, embed_rng)
        for layer, layer_rng in zip(self.encoder, layer_rngs, strict=True):
            x = layer(x, mask=mask, rng=layer_rng)
        return x if self.encoder_norm is None else self.encoder_norm(x)

    def decode(
        self,
        target: Any,
        memory: Array,
        *,
        source: Any = None,
        rng: Rng | None = None,
        cache: Cache | None = None,
    ) -> Array:
        """Logits from a memory.

        target: ids (batch, target length); memory: (batch, source length, d_model); source: the ids the memory was
        made from, to mask its padding (None: nothing was padded). With a cache, target holds only the tokens that
        are new since the last call. Returns (batch, target length, target_vocab_size).
        """
        target = self.target_ids(target)
        _check_memory(memory, target, self.config.d_model)
        embed_rng, *layer_rngs = rng.split(1 + len(self.decoder)) if rng else (None,) * (1 + len(self.decoder))
        memory_mask = None if source is None else masks.padding(self.source_ids(source), self.config.pad_id)
        # Cached tokens are real ones by construction; without a cache, padding on the left has to be masked.
        mask = masks.padding(target, self.config.pad_id) if cache is None else None
        x = self._embed(self._target_embedding(), target, cache.length if cache else 0, embed_rng)
        caches = cache.layers if cache else (None,) * len(self.decoder)
        for layer, layer_rng, layer_cache in zip(self.decoder, layer_rngs, caches, strict=True):
            x = layer(x, memory, mask=mask, memory_mask=memory_mask, rng=layer_rng, cache=layer_cache)
        return self._logits(x if self.decoder_norm is None else self.decoder_norm(x))

    def cross_attention_weights(self, source: Any, target: Any) -> list[Array]:
        """How each target token attends to the source, to look at: per layer (batch, heads, target, source)."""
        source, target = self.source_ids(source), self.target_ids(target)
        memory, found = self.encode(source), []
        mask, memory_mask = (masks.padding(ids, self.config.pad_id) for ids in (target, source))
        x = self._embed(self._target_embedding(), target, 0, None)
        for layer in self.decoder:
            found.append(layer.cross_attention_weights(x, memory, mask=mask, memory_mask=memory_mask))
            x = layer(x, memory, mask=mask, memory_mask=memory_mask)
        return found

    def source_ids(self, data: Any) -> Array:
        """Check source ids and bring them to the model's library."""
        return as_token_ids(data, "source", self.config.source_vocab_size, self.source_embedding.weight)

    def target_ids(self, data: Any) -> Array:
        """Check target ids and bring them to the model's library."""
        return as_token_ids(data, "target", self.config.target_vocab_size, self.source_embedding.weight)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and configuration to one safetensors file, atomically."""
        dtype = dtype_name(self.source_embedding.weight.dtype)
        metadata = {"format": "xformer", "config": json.dumps(self.config.to_dict()), "dtype": dtype}
        save_arrays(path, dict(self.named_parameters()), metadata)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        xp: Any,
        dtype: DType | str | None = None,
        device: Device = None,
    ) -> Transformer:
        """Read a model that `save` wrote, into any library.

        dtype: default the one it was saved in; where the library does not have it, and for bfloat16 in NumPy, float32.

        Raises CheckpointError when the file is not such a model, BackendError when library, dtype or device is not
        there.
        """
        arrays, metadata = load_arrays(path)
        if metadata.get("format") != "xformer" or "config" not in metadata:
            raise CheckpointError(f"{path} is a safetensors file, but not an xformer model: it has no configuration")
        try:
            config = TransformerConfig.from_dict(json.loads(metadata["config"]))
            stored = restorable_dtype(xp, metadata.get("dtype", "float32"))
            blank = cls(config, xp=xp, dtype=stored if dtype is None else dtype, device=device)
            return replace(blank, place(arrays, dict(blank.named_parameters())))  # type: ignore[no-any-return]
        except (ConfigError, ShapeError, ValueError) as error:
            raise CheckpointError(
                f"{path} does not hold the model that its configuration describes: {error}"
            ) from error

    def _target_embedding(self) -> Embedding:
        return self.source_embedding if self.target_embedding is None else self.target_embedding

    def _embed(self, embedding: Embedding, ids: Array, start: int, rng: Rng | None) -> Array:
        """Token vectors plus positions, with dropout: (batch, length) -> (batch, length, d_model)."""
        x = embedding(ids)
        table = sinusoidal(
            ids.shape[1], self.config.d_model, start=start, xp=array_namespace(x), dtype=x.dtype, device=device(x)
        )
        return self.dropout(x + table, rng)

    def _logits(self, x: Array) -> Array:
        logits = self._target_embedding().unembed(x) if self.output is None else self.output(x)
        return logits if self.output_bias is None else logits + self.output_bias


def _check_memory(memory: Array, target: Array, d_model: int) -> None:
    if len(memory.shape) != 3 or memory.shape[0] != target.shape[0] or memory.shape[2] != d_model:
        raise ShapeError(
            f"memory has shape {tuple(memory.shape)}; expected ({target.shape[0]}, source length, {d_model}) for "
            f"target ids of shape {tuple(target.shape)}"
        )
