"""Normalization of the features of each token.

Every norm takes features in float16 and bfloat16 up to the largest number of the format: rows are scaled down before
anything is squared (see ops/layer_norm.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from xformer.backends import Array, array_namespace
from xformer.errors import ConfigError
from xformer.layers.initializer import Initializer
from xformer.ops.layer_norm import layer_norm
from xformer.ops.rms_norm import rms_norm
from xformer.tree import Module


class Norm(Protocol):
    """A norm: (..., features) -> the same shape."""

    def __call__(self, x: Array) -> Array:
        """x: (..., features) -> the same shape."""
        ...


class LayerNorm(Module):
    """Layer normalization with a learned scale and shift (Ba, Kiros and Hinton, 2016).

    epsilon is added to the (biased) variance.
    """

    weight: Array
    bias: Array | None
    epsilon: float

    def __init__(self, features: int, *, epsilon: float = 1e-5, bias: bool = True, init: Initializer):
        self.weight = init.ones((features,))
        self.bias = init.zeros((features,)) if bias else None
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """x: (..., features) -> the same shape."""
        return layer_norm(x, self.weight, self.bias, epsilon=self.epsilon)


class MaxScaledLayerNorm(Module):
    """Layer normalization of rows that were divided by max |x| + epsilon, so that no row is too large to square."""

    weight: Array
    bias: Array | None
    epsilon: float

    def __init__(self, features: int, *, epsilon: float = 1e-5, bias: bool = True, init: Initializer):
        self.weight = init.ones((features,))
        self.bias = init.zeros((features,)) if bias else None
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """x: (..., features) -> the same shape."""
        xp = array_namespace(x)
        largest = xp.max(xp.abs(x), axis=-1, keepdims=True) + self.epsilon
        scaled = x / xp.astype(largest, x.dtype, copy=False)  # which is wider where a library has no bfloat16 of it
        return layer_norm(scaled, self.weight, self.bias, epsilon=self.epsilon)


class RMSNorm(Module):
    """Root mean square normalization with a learned scale (Zhang and Sennrich, 2019): no mean is taken off."""

    weight: Array
    epsilon: float

    def __init__(self, features: int, *, epsilon: float = 1e-5, init: Initializer):
        self.weight = init.ones((features,))
        self.epsilon = epsilon

    def __call__(self, x: Array) -> Array:
        """x: (..., features) -> the same shape."""
        return rms_norm(x, self.weight, epsilon=self.epsilon)


NORMS: dict[str, Callable[..., Norm]] = {"layer": LayerNorm, "max_scaled": MaxScaledLayerNorm, "rms": RMSNorm}


def norm_named(name: str) -> Callable[..., Norm]:
    """Return the norm of that name; raises ConfigError for an unknown one."""
    if not isinstance(name, str) or name not in NORMS:
        raise ConfigError(f"norm is {name!r}; expected one of {', '.join(NORMS)}")
    return NORMS[name]
