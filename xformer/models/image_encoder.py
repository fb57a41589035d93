"""The Vision Transformer (Dosovitskiy et al., 2021)."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends import (
    Array,
    Device,
    DType,
    array_namespace,
    backend_name,
    base_namespace,
    check_same_device,
    device,
    dtype_name,
    from_host,
    is_floating,
)
from xformer.errors import BackendError, ConfigError, ShapeError
from xformer.layers import EncoderLayer, Initializer, InputEmbedding, Linear, PatchEmbedding
from xformer.layers.normalization import Norm
from xformer.layers.positions import RelativePositions, position_terms
from xformer.models.base import BaseModel
from xformer.models.builder import LayerFactory
from xformer.models.config import ImageEncoderConfig
from xformer.models.encoder import Pooler
from xformer.random import Rng, split_rng
from xformer.tree import is_array


class ImageEncoder(BaseModel):
    """Vision Transformer: compute a vector for an image and for each of its patches (Dosovitskiy et al., 2021).

    Inputs are arrays of pixels of the model's size. Checkpoints say in preprocessor_config.json how to normalize them,
    usually (pixels / 255 - image_mean) / image_std for each channel.

    Args:
        config: Configuration.
        xp: Array library, as a module or by name.
        seed: Seed of the parameters; the same seed gives the same parameters in every library.
        dtype: Floating dtype of the parameters; default float32.
        device: Device of the parameters, as the library names it.

    Example:
        >>> import numpy as np
        >>> config = ImageEncoderConfig(image_size=8, patch_size=4, d_model=8, num_heads=2, d_ff=16, num_layers=1)
        >>> model = ImageEncoder(config)
        >>> model(np.zeros((1, 3, 8, 8), dtype=np.float32)).shape
        (1, 5, 8)
    """

    config_class = ImageEncoderConfig

    embedding: PatchEmbedding
    layers: tuple[EncoderLayer, ...]
    norm: Norm | None
    input: InputEmbedding
    positions: RelativePositions | None
    pooler: Pooler | None
    classifier: Linear | None
    config: ImageEncoderConfig

    def __init__(
        self,
        config: ImageEncoderConfig,
        *,
        xp: Any = "numpy",
        seed: int | Rng | None = 0,
        dtype: DType | str | None = None,
        device: Device = None,
    ):
        init = Initializer(xp, seed=seed, dtype=dtype, device=device)
        make, c = LayerFactory(config, init), config
        self.embedding = PatchEmbedding(c.num_channels, c.d_model, patch_size=c.patch_size, init=init)
        self.layers = tuple(make.encoder_layer(i) for i in range(c.num_layers))
        self.norm = make.final_norm()
        self.input = make.input_embedding(1 + c.num_patches)
        self.positions = make.relative_positions(bidirectional=True)
        self.pooler = Pooler(Linear(c.d_model, c.d_model, init=init), c.pooler) if c.pooler != "none" else None
        self.classifier = Linear(c.d_model, c.num_labels, init=init) if c.num_labels else None
        self.config = config

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
        terms = position_terms(self.positions, x.shape[1], x.shape[1], x)._asdict()
        x = self._apply_layers(self.layers, x, options={"mask": None, **terms}, rngs=layer_rngs)
        return x if self.norm is None else self.norm(x)

    def class_logits(self, states: Array) -> Array:
        """Compute the logits of the classes of each image, (batch, num_labels).

        Args:
            states: Result of a call, (batch, 1 + num_patches, d_model).

        Raises:
            ConfigError: If the model has no classifier.
        """
        if self.classifier is None:
            raise ConfigError("this model has no classifier (num_labels is 0)")
        return self.classifier(states[:, 0, :] if self.pooler is None else self.pooler(states))

    def _as_images(self, data: Any) -> Array:
        like = self.embedding.weight
        xp = base_namespace(array_namespace(like))
        data = data if is_array(data) else from_host(np, data)
        c, shape = self.config, tuple(data.shape)
        if not is_floating(data.dtype) or len(shape) != 4 or shape[1:] != (c.num_channels, c.image_size, c.image_size):
            raise ShapeError(
                f"images have shape {shape} and dtype {dtype_name(data.dtype)}; "
                f"expected floating pixels (batch, {c.num_channels}, {c.image_size}, {c.image_size})"
            )
        library = backend_name(array_namespace(data))
        if library == backend_name(xp):
            check_same_device((like, data))
            return data
        if library != "numpy":
            raise BackendError(
                f"images are an array of {library} and the model one of {backend_name(xp)}; expected an array of that "
                "library, a NumPy array or nested lists"
            )
        return from_host(xp, data, dtype=like.dtype, device=device(like))
