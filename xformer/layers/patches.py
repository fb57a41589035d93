"""The input layer of image models."""

from __future__ import annotations

from xformer.backends import Array, array_namespace
from xformer.config import as_flag
from xformer.errors import ShapeError
from xformer.layers.initializer import Init, initializer
from xformer.layers.linear import as_dtype_of
from xformer.ops.linear import linear
from xformer.tree import Module, check_array


class PatchEmbedding(Module):
    """Turn an image into a vector for each square patch, after a learned class vector (Dosovitskiy et al., 2021, 3.1).

    Patches do not overlap, so the convolution of other implementations is a reshape and a matrix product. The weight is
    stored (patch_size, patch_size, num_channels, d_model), the transpose of torch's: its first axis counts columns.

    Args:
        num_channels: Channels of a pixel, e.g. 3.
        d_model: Features of a vector.
        patch_size: Height and width of a patch, in pixels.
        class_token: Put the class vector before those of the patches.
        bias: Add a learned bias to the vectors of patches.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.

    Examples:
        >>> import numpy as np
        >>> layer = PatchEmbedding(3, 8, patch_size=4, init=7)
        >>> layer(np.ones((2, 3, 8, 12), dtype=np.float32)).shape
        (2, 7, 8)
    """

    weight: Array
    bias: Array | None
    class_token: Array | None

    def __init__(
        self,
        num_channels: int,
        d_model: int,
        *,
        patch_size: int,
        class_token: bool = True,
        bias: bool = True,
        init: Init = None,
    ):
        init = initializer(init)
        weight = init.xavier_uniform((patch_size * patch_size * num_channels, d_model))
        self.weight = array_namespace(weight).reshape(weight, (patch_size, patch_size, num_channels, d_model))
        self.bias = init.zeros((d_model,)) if as_flag("bias", bias) else None
        self.class_token = init.normal((1, d_model), d_model**-0.5) if as_flag("class_token", class_token) else None

    def __call__(self, images: Array) -> Array:
        """Compute the vectors of the class token and of the patches, row by row.

        Args:
            images: Floating array (batch, num_channels, height, width); cast to the dtype of the weight.

        Returns:
            Array (batch, 1 + height / patch_size * width / patch_size, d_model); without a class token, one row less.

        Raises:
            ShapeError: If the images have another rank or number of channels, or sides that are no multiple of
                patch_size.
        """
        size, _, channels, d_model = self.weight.shape
        shape = check_array(images, "images")
        if len(shape) != 4 or shape[1] != channels or shape[2] % size or shape[3] % size or 0 in shape[2:]:
            raise ShapeError(
                f"images have shape {shape}; expected (batch, {channels}, height, width) with multiples of {size}"
            )
        batch, rows, columns = shape[0], shape[2] // size, shape[3] // size
        x = as_dtype_of(images, self.weight)
        xp = array_namespace(x, self.weight)
        x = xp.permute_dims(xp.reshape(x, (batch, channels, rows, size, columns, size)), (0, 2, 4, 5, 3, 1))
        x = xp.reshape(x, (batch, rows * columns, size * size * channels))
        x = linear(x, xp.reshape(self.weight, (size * size * channels, d_model)), self.bias)
        if self.class_token is None:
            return x
        return xp.concat([xp.broadcast_to(self.class_token, (batch, 1, d_model)), x], axis=1)
