"""Normalization of the features of each token.

Every norm accepts float16 and bfloat16 features up to the largest number of the format: rows are scaled down before
they are squared (see ops/norms.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xformer.backends import Array, array_namespace
from xformer.config import check_bool
from xformer.layers.initializer import Initializer, initializer
from xformer.layers.linear import as_dtype_of
from xformer.ops.norms import layer_norm, rms_norm
from xformer.tree import Module


class Norm(Protocol):
    """Protocol of a normalization layer."""

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis of an array of shape (..., features); return the same shape."""
        ...


class LayerNorm(Module):
    """Layer normalization with a learned scale and shift (Ba, Kiros and Hinton, 2016).

    Args:
        features: Size of the last axis.
        epsilon: Added to the (biased) variance.
        bias: Add a learned shift.
        init: An `Initializer`, or a seed for a new one on NumPy; only its library and dtype are used.
    """

    weight: Array
    bias: Array | None
    epsilon: float

    def __init__(self, features: int, *, epsilon: float = 1e-5, bias: bool = True, init: Initializer | int = 0):
        init = initializer(init)
        self.weight = init.ones((features,))
        self.bias = init.zeros((features,)) if check_bool("bias", bias) else None
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis.

        Args:
            x: Floating array of shape (..., features); cast to the dtype of the weight.

        Returns:
            Array of the shape of `x`.
        """
        return layer_norm(as_dtype_of(x, self.weight), self.weight, self.bias, epsilon=self.epsilon)


class MaxScaledLayerNorm(LayerNorm, init=False):
    """Layer normalization of rows divided by max |x| + epsilon, so that no row is too large to square.

    Arguments are those of `LayerNorm`.
    """

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis: (..., features) -> the same shape."""
        x = as_dtype_of(x, self.weight)
        xp = array_namespace(x)
        largest = xp.max(xp.abs(x), axis=-1, keepdims=True) + self.epsilon
        scaled = x / as_dtype_of(largest, x)  # NumPy widens bfloat16 plus a Python float to float32
        return layer_norm(scaled, self.weight, self.bias, epsilon=self.epsilon)


class RMSNorm(Module):
    """Root mean square normalization with a learned scale (Zhang and Sennrich, 2019): the mean is not subtracted.

    Args:
        features: Size of the last axis.
        epsilon: Added to the mean square.
        init: An `Initializer`, or a seed for a new one on NumPy; only its library and dtype are used.
    """

    weight: Array
    epsilon: float

    def __init__(self, features: int, *, epsilon: float = 1e-5, init: Initializer | int = 0):
        self.weight = initializer(init).ones((features,))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """Normalize the last axis: (..., features) -> the same shape."""
        return rms_norm(as_dtype_of(x, self.weight), self.weight, epsilon=self.epsilon)


class Identity(Module):
    """Return the input: a layer in place of a norm, for no norm."""

    def __call__(self, x: Array) -> Array:
        """Return `x`, of any shape."""
        return x


NORMS: dict[str, Callable[..., Norm]] = {"layer": LayerNorm, "max_scaled": MaxScaledLayerNorm, "rms": RMSNorm}
