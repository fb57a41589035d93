"""The Vision Transformer (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends import (
    Array,
    array_namespace,
    as_array,
    device,
    dtype_name,
    is_floating,
    to_library_of,
)
from xformer.errors import ShapeError
from xformer.layers import Linear, PatchEmbedding
from xformer.models.builder import LayerFactory
from xformer.models.config import ImageEncoderConfig
from xformer.models.encoder import EncoderBase
from xformer.random import Rng, split_rng
from xformer.tracing.activations import named


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
            BackendError: For an array of a third library or on another device.
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
            raise ShapeError(
                f"images have shape {shape} and dtype {dtype_name(data.dtype)}; "
                f"expected floating pixels (batch, {c.num_channels}, {sides}"
            )
        return to_library_of(data, like, "images are", dtype=like.dtype)


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
