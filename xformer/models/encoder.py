"""The encoder-only Transformer (Devlin et al., 2019) with its heads, of tokens and of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, as_array, device, dtype_name, is_floating, to_host, to_library_of
from xformer.errors import ConfigError, DataError, ShapeError
from xformer.layers import (
    Embedding,
    EncoderLayer,
    FeedForward,
    InputEmbedding,
    Linear,
    MixtureOfExperts,
    MultiHeadAttention,
    PatchEmbedding,
    RelativeEmbedding,
    SharedNormEncoderLayer,
)
from xformer.layers.basic import Norm
from xformer.layers.positions import RelativePositions
from xformer.layers.transformer import Residual, final
from xformer.models.base import BaseModel, LayerFactory
from xformer.models.config import EncoderConfig, ImageEncoderConfig, ImageTextEncoderConfig
from xformer.models.token_ids import as_token_ids, ids_of, pad, padding_mask, positions_of
from xformer.ops.activations import Activation, activation
from xformer.random import Rng, split_rng
from xformer.tracing.activations import named
from xformer.tree import Module, check_array, is_array, wrong_array


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


# --- Images: the Vision Transformer (Dosovitskiy et al., 2021) --------------------------------------------------------


class ImageEncoder(EncoderBase, init=False):
    """Vision Transformer: compute a vector for an image and for each of its patches (Dosovitskiy et al., 2021).

    Inputs are arrays of pixels of the model's size, which `xformer.data.images.ImageProcessor` makes for a checkpoint.

    Arguments are those of `BaseModel`.

    Examples:
        >>> import numpy as np
        >>> config = ImageEncoderConfig(image_size=8, patch_size=4, d_model=8, num_heads=2, d_ff=16, num_layers=1)
        >>> model = ImageEncoder(config)
        >>> model(np.zeros((1, 3, 8, 8), dtype=np.float32)).shape
        (1, 5, 8)
    """

    config_class = ImageEncoderConfig

    embedding: PatchEmbedding
    config: ImageEncoderConfig

    def _build(self, make: LayerFactory) -> None:
        c = self.config
        options = {"class_token": c.class_token, "bias": c.patch_bias}
        self.embedding = PatchEmbedding(c.num_channels, c.d_model, patch_size=c.patch_size, **options, init=make.init)
        self._build_layers(make, c.class_token + c.num_patches)
        features = 2 * c.d_model if c.classify_patches else c.pooled_features
        self.classifier = Linear(features, c.num_labels, init=make.init) if c.num_labels else None

    def __call__(self, images: Any, *, rng: Rng | None = None) -> Array:
        """Compute the states of the last layer.

        Args:
            images: Normalized pixels, floating (batch, num_channels, image_size, image_size), as an array of the
                model's library, a NumPy array or nested lists. With resize_positions, any multiples of patch_size.
            rng: Draws dropout; None switches it off.

        Returns:
            Array of shape (batch, 1 + num_patches, d_model): the class token, if the model has one, then the patches
            row by row.

        Raises:
            ShapeError: For other shapes or dtypes.
            BackendError: For an array of another library or on another device; NumPy arrays are moved.
        """
        input_rng, *layer_rngs = split_rng(rng, 1 + self.config.num_layers)
        images = self._as_images(images)
        positions, size, patch = None, self.config.image_size, self.config.patch_size
        height, width = (side // patch * patch for side in images.shape[2:])
        if tuple(images.shape[2:]) != (size, size):
            positions = self._resized_positions(height // patch, width // patch)
        images = images[:, :, :height, :width] if size % patch else images
        x = self.input(named(self, "embeddings", self.embedding(images)), position_embeddings=positions, rng=input_rng)
        return self._encode(x, None, layer_rngs)

    def class_logits(self, states: Array, *, mask: Any = None) -> Array:
        """Compute the logits of the classes of each image; see `Encoder.class_logits`."""
        if self.classifier is None or not self.config.classify_patches:
            return super().class_logits(states, mask=mask)
        xp = array_namespace(states)
        return self.classifier(xp.concat([states[:, 0, :], xp.mean(states[:, 1:, :], axis=1)], axis=-1))

    def _resized_positions(self, rows: int, columns: int) -> Array:
        """Return learned positions for a number of rows and columns of patches, by bicubic interpolation."""
        table = self.input.positions.weight  # type: ignore[union-attr] # the configuration has learned positions
        xp, side, d_model = array_namespace(table), self.config.image_size // self.config.patch_size, table.shape[1]
        down, across = (
            xp.from_host(bicubic(side, count), dtype=table.dtype, device=device(table)) for count in (rows, columns)
        )
        x = xp.matmul(down, xp.reshape(table[1:, :], (side, side * d_model)))
        x = xp.matmul(across, xp.reshape(x, (rows, side, d_model)))
        return xp.concat([table[:1, :], xp.reshape(x, (rows * columns, d_model))], axis=0)

    def _as_images(self, data: Any) -> Array:
        like = self.embedding.weight
        data = as_array(data, like, "images are")
        c, shape = self.config, tuple(data.shape)
        is_size, sides = shape[2:] == (c.image_size, c.image_size), f"{c.image_size}, {c.image_size})"
        if c.resize_positions:
            is_size = all(side and side % c.patch_size == 0 for side in shape[2:])
            sides = f"height, width), multiples of {c.patch_size}"
        if not is_floating(data.dtype) or len(shape) != 4 or shape[1] != c.num_channels or not is_size:
            raise wrong_array(data, "images have", f"floating pixels (batch, {c.num_channels}, {sides}")
        return to_library_of(data, like, "images are", dtype=like.dtype)


# --- Images and texts (Radford et al., 2021) --------------------------------------------------------------------------


class ImageTextEncoder(BaseModel, init=False):
    """Encoders of images and texts whose vectors are compared (CLIP, Radford et al., 2021; SigLIP, Zhai et al., 2023).

    The logit of an image and a text is the cosine of their vectors, multiplied by a learned scale; SigLIP adds a bias.

    Arguments are those of `BaseModel`.

    Attributes:
        text: Encoder of texts.
        image: Encoder of images.
        logit_scale: Logarithm of the scale, (1,).
        logit_bias: Bias, (1,), or None.

    Examples:
        >>> import numpy as np
        >>> from xformer.models import EncoderConfig, ImageEncoderConfig
        >>> sizes = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_layers": 1, "pooler": "identity"}
        >>> text = EncoderConfig(vocab_size=13, pooling="last", **sizes)
        >>> image = ImageEncoderConfig(image_size=8, patch_size=4, **sizes)
        >>> model = ImageTextEncoder(ImageTextEncoderConfig(text=text, image=image))
        >>> model(np.zeros((2, 3, 8, 8), dtype=np.float32), [[5, 4, 2], [7, 2, 0], [6, 3, 2]]).shape
        (2, 3)
    """

    config_class = ImageTextEncoderConfig  # type: ignore[assignment] # it has two configurations

    text: Encoder
    image: ImageEncoder
    logit_scale: Array
    logit_bias: Array | None
    config: ImageTextEncoderConfig  # type: ignore[assignment]

    def _build(self, make: LayerFactory) -> None:
        c, init = self.config, make.init
        self.text = Encoder(c.text, seed=init)
        self.image = ImageEncoder(c.image, seed=init)
        # The initial values of both papers.
        self.logit_scale = init.full((1,), math.log(10.0 if c.sigmoid else 1.0 / 0.07))
        self.logit_bias = init.full((1,), -10.0) if c.sigmoid else None

    def __call__(self, images: Any, tokens: Any, *, mask: Any = None, rng: Rng | None = None) -> Array:
        """Compute the logit of each image and each text.

        Args:
            images: As for `ImageEncoder`.
            tokens: As for `encode_text`; any number of texts.
            mask: As for `encode_text`.
            rng: Draws dropout; None switches it off.

        Returns:
            Logits (images, texts).
        """
        image_rng, text_rng = split_rng(rng, 2)
        return self.logits(self.encode_image(images, rng=image_rng), self.encode_text(tokens, mask=mask, rng=text_rng))

    def encode_image(self, images: Any, *, normalize: bool = False, rng: Rng | None = None) -> Array:
        """Compute a vector for each image.

        Args:
            images: As for `ImageEncoder`.
            normalize: Divide vectors by their length, so that dot products are cosine similarities.
            rng: Draws dropout; None switches it off.

        Returns:
            Vectors (images, features).
        """
        vectors = self.image.pooler(self.image(images, rng=rng))  # type: ignore[misc] # the configuration has a pooler
        return normalized(vectors) if normalize else vectors

    def encode_text(self, tokens: Any, *, mask: Any = None, normalize: bool = False, rng: Rng | None = None) -> Array:
        """Compute a vector for each text.

        Args:
            tokens: Ids (texts, length). If the configuration has an eos_id (CLIP), a text ends with the first one.
                Otherwise all tokens other than pad_id belong to the text. SigLIP has neither: its texts are padded to
                one length, and tokens attend to the padding.
            mask: Boolean, True = may be attended to, (texts, length). Default: the tokens of the text.
            normalize: As for `encode_image`.
            rng: Draws dropout; None switches it off.

        Returns:
            Vectors (texts, features).

        Raises:
            DataError: For ids out of range, and for a text without its eos_id.
            ShapeError: For other ranks, and a mask of another shape or dtype.
            BackendError: For an array of another library.
        """
        tokens = as_token_ids(tokens, "token", self.config.text.vocab_size, self._parameter)
        self._check_ends(ids_of(tokens))
        vectors = self._encode_ids(tokens, mask=mask, rng=rng)
        return normalized(vectors) if normalize else vectors

    def _encode_ids(self, tokens: Array, *, mask: Any = None, rng: Rng | None = None) -> Array:
        """Compute the vectors of texts, of which those without an eos_id end with their last token."""
        ids = ids_of(tokens)
        is_token = self._is_token(ids)
        mask = is_token if mask is None else as_token_mask(mask, ids)
        states = self.text(tokens, mask=None if mask is None else mask[:, None, None, :], rng=rng)
        return self.text.pooler(states, is_token)  # type: ignore[misc] # the configuration has a pooler

    def logits(self, image_vectors: Array, text_vectors: Array) -> Array:
        """Compute the logits (images, texts) of vectors, whose lengths have no effect.

        Args:
            image_vectors: Result of `encode_image`, (images, features).
            text_vectors: Result of `encode_text`, (texts, features).

        Raises:
            ShapeError: For arrays of other shapes.
        """
        features = self.config.text.pooled_features
        check_array(image_vectors, "image_vectors", "images", features)
        check_array(text_vectors, "text_vectors", "texts", features)
        xp = array_namespace(image_vectors, text_vectors)
        cosines = xp.matmul(normalized(image_vectors), xp.matrix_transpose(normalized(text_vectors)))
        logits = cosines * xp.exp(self.logit_scale)
        return logits if self.logit_bias is None else logits + self.logit_bias

    def _check_ends(self, ids: Array) -> None:
        """Raise DataError if a text lacks its eos_id, where reading values is cheap."""
        eos_id = self.config.text.eos_id
        if eos_id is None or not array_namespace(ids).is_host_accessible(ids):
            return
        has_eos = np.any(to_host(ids) == eos_id, axis=1)
        if not has_eos.all():
            row = int(np.argmin(has_eos))
            raise DataError(f"tokens[{row}] has no eos_id, {eos_id}; expected one at the end of each text")

    def _is_token(self, ids: Array) -> Array | None:
        """Return the mask (texts, length) of the tokens of texts; None if all are."""
        c = self.config.text
        if c.eos_id is None:
            return None if c.padding_id is None else ids != c.padding_id
        xp = array_namespace(ids)
        is_eos = xp.astype(ids == c.eos_id, ids.dtype)
        return xp.cumulative_sum(is_eos, axis=1) - is_eos == 0


def bicubic(size: int, new_size: int) -> Any:
    """Return the matrix (new_size, size) of bicubic interpolation along an axis, as torch's interpolate has it.

    The weights are those of Keys (1981) with a = -0.75; the border is repeated.
    """
    place = (np.arange(new_size) + 0.5) * size / new_size - 0.5
    matrix = np.zeros((new_size, size))
    for offset in (-1, 0, 1, 2):
        x = np.abs(np.floor(place) + offset - place)
        near, far = (1.25 * x - 2.25) * x * x + 1.0, ((-0.75 * x + 3.75) * x - 6.0) * x + 3.0
        index = np.clip(np.floor(place) + offset, 0, size - 1).astype(int)
        np.add.at(matrix, (np.arange(new_size), index), np.where(x <= 1.0, near, far))
    return matrix
