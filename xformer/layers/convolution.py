"""Convolution over time, and the input layers of speech and image models."""

from __future__ import annotations

from xformer.backends import Array, array_namespace, device
from xformer.config import check_bool
from xformer.layers.basic import Init, as_dtype_of, initializer
from xformer.ops.activations import Activation
from xformer.ops.linear import linear
from xformer.tree import Module, check_array, wrong_array


class Conv1d(Module):
    """Convolution over the second axis, with zeros as padding: an affine map of neighboring frames.

    The weight is stored (kernel_size, in_features, out_features), the transpose of torch's.

    Args:
        in_features: Size of the last axis of the input.
        out_features: Size of the last axis of the output.
        kernel_size: Frames that an output depends on.
        stride: Frames between the inputs of neighboring outputs.
        padding: Frames of zeros that are added at either end.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.

    Examples:
        >>> import numpy as np
        >>> layer = Conv1d(4, 3, stride=2, init=7)
        >>> layer(np.ones((2, 10, 4), dtype=np.float32)).shape
        (2, 5, 3)
    """

    weight: Array
    bias: Array
    stride: int
    padding: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        kernel_size: int = 3,
        stride: int = 1,
        padding: int = 1,
        init: Init = None,
    ):
        init = initializer(init)
        weight = init.xavier_uniform((kernel_size * in_features, out_features))
        self.weight = array_namespace(weight).reshape(weight, (kernel_size, in_features, out_features))
        self.bias = init.zeros((out_features,))
        self.stride, self.padding = stride, padding

    def __call__(self, x: Array, activation: Activation | None = None) -> Array:
        """Apply the convolution, and optionally an activation.

        Args:
            x: Floating array (batch, length, in_features); cast to the dtype of the weight.
            activation: Name of a function applied to the result, e.g. "gelu".

        Returns:
            Array (batch, (length + 2 padding - kernel_size) // stride + 1, out_features).

        Raises:
            ShapeError: If x has another rank or number of features, or is shorter than the kernel.
        """
        xp, (kernel_size, features, _) = array_namespace(x), self.weight.shape
        if len(x.shape) != 3 or x.shape[2] != features or x.shape[1] + 2 * self.padding < kernel_size:
            least = max(1, kernel_size - 2 * self.padding)
            raise wrong_array(x, "x has", f"(batch, length, {features}) with a length of at least {least}")
        x = as_dtype_of(x, self.weight)
        if self.padding:
            zeros = xp.zeros((x.shape[0], self.padding, features), dtype=x.dtype, device=device(x))
            x = xp.concat([zeros, x, zeros], axis=1)
        last = (x.shape[1] - kernel_size) // self.stride * self.stride  # first frame of the last window
        windows = [x[:, start : start + last + 1 : self.stride, :] for start in range(kernel_size)]
        weight = array_namespace(self.weight).reshape(self.weight, (kernel_size * features, -1))
        return linear(xp.concat(windows, axis=2), weight, self.bias, activation=activation)


class AudioEmbedding(Module):
    """Turn the frames of a spectrogram into half as many vectors, by two convolutions (Radford et al., 2023, 2.2).

    Args:
        num_features: Features of a frame, e.g. mel bands.
        d_model: Features of a vector.
        activation: Name of the function applied to the output of each convolution.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.
    """

    conv1: Conv1d
    conv2: Conv1d
    activation: Activation

    def __init__(self, num_features: int, d_model: int, *, activation: Activation = "gelu", init: Init = None):
        init = initializer(init)
        self.conv1 = Conv1d(num_features, d_model, init=init)
        self.conv2 = Conv1d(d_model, d_model, stride=2, init=init)
        self.activation = activation

    @property
    def weight(self) -> Array:
        """A parameter, for its library, dtype and device."""
        return self.conv1.weight

    def __call__(self, frames: Array) -> Array:
        """Apply both convolutions.

        Args:
            frames: Floating array (batch, frames, num_features).

        Returns:
            Array (batch, (frames + 1) // 2, d_model).
        """
        return self.conv2(self.conv1(frames, self.activation), self.activation)


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
        self.bias = init.zeros((d_model,)) if check_bool("bias", bias) else None
        self.class_token = init.normal((1, d_model), d_model**-0.5) if check_bool("class_token", class_token) else None

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
            expected = f"(batch, {channels}, height, width) with multiples of {size}"
            raise wrong_array(images, "images have", expected)
        batch, rows, columns = shape[0], shape[2] // size, shape[3] // size
        x = as_dtype_of(images, self.weight)
        xp = array_namespace(x, self.weight)
        x = xp.permute_dims(xp.reshape(x, (batch, channels, rows, size, columns, size)), (0, 2, 4, 5, 3, 1))
        x = xp.reshape(x, (batch, rows * columns, size * size * channels))
        x = linear(x, xp.reshape(self.weight, (size * size * channels, d_model)), self.bias)
        if self.class_token is None:
            return x
        return xp.concat([xp.broadcast_to(self.class_token, (batch, 1, d_model)), x], axis=1)
