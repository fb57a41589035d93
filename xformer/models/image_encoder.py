"""The Vision Transformer (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array, array_namespace, base_namespace, device, dtype_name, from_host, is_floating
from xformer.errors import ShapeError
from xformer.layers import Linear, PatchEmbedding
from xformer.models.builder import LayerFactory
from xformer.models.config import ImageEncoderConfig
from xformer.models.encoder import EncoderBase
from xformer.models.token_ids import as_array
from xformer.random import Rng, split_rng


class ImageEncoder(EncoderBase, init=False):
    """Vision Transformer: compute a vector for an image and for each of its patches (Dosovitskiy et al., 2021).

    Inputs are arrays of pixels of the model's size, which `xformer.data.images.ImageProcessor` makes for a checkpoint.

    Arguments are those of `BaseModel`.

    Example:
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
        self.embedding = PatchEmbedding(c.num_channels, c.d_model, patch_size=c.patch_size, init=make.init)
        self._build_layers(make, 1 + c.num_patches)
        self.classifier = Linear(c.d_model, c.num_labels, init=make.init) if c.num_labels else None

    def __call__(self, images: Any, *, rng: Rng | None = None) -> Array:
        """Compute the states of the last layer.

        Args:
            images: Normalized pixels, floating (batch, num_channels, image_size, image_size), as an array of the
                model's library, a NumPy array or nested lists.
            rng: Draws dropout; None switches it off.

        Returns:
            Array of shape (batch, 1 + num_patches, d_model): the class token, then the patches row by row.

        Raises:
            ShapeError: For other shapes or dtypes.
            BackendError: For an array of a third library or on another device.
        """
        input_rng, *layer_rngs = split_rng(rng, 1 + len(self.layers))
        x = self.input(self.embedding(self._as_images(images)), rng=input_rng)
        return self._encode(x, None, layer_rngs)

    def _as_images(self, data: Any) -> Array:
        like = self.embedding.weight
        data, is_same_library = as_array(data, "images are", like)
        c, shape = self.config, tuple(data.shape)
        if not is_floating(data.dtype) or len(shape) != 4 or shape[1:] != (c.num_channels, c.image_size, c.image_size):
            raise ShapeError(
                f"images have shape {shape} and dtype {dtype_name(data.dtype)}; "
                f"expected floating pixels (batch, {c.num_channels}, {c.image_size}, {c.image_size})"
            )
        if is_same_library:
            return data
        return from_host(base_namespace(array_namespace(like)), data, dtype=like.dtype, device=device(like))
