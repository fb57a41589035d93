"""The Vision Transformer (Dosovitskiy et al., 2021), and encoders of images and texts (Radford et al., 2021)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer.backends import Array, array_namespace, as_array, device, is_floating, to_host, to_library_of
from xformer.errors import DataError
from xformer.layers import Linear, PatchEmbedding
from xformer.models.base import BaseModel
from xformer.models.builder import LayerFactory
from xformer.models.config import ImageEncoderConfig, ImageTextEncoderConfig
from xformer.models.encoder import Encoder, EncoderBase, as_token_mask, normalized
from xformer.models.token_ids import as_token_ids, ids_of
from xformer.random import Rng, split_rng
from xformer.tracing.activations import named
from xformer.tree import check_array, wrong_array


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
