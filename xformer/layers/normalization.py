"""Normalization of the features of each token."""

from __future__ import annotations

from xformer.layers.initializer import Initializer
from xformer.namespace import Array
from xformer.ops.layer_norm import layer_norm
from xformer.tree import Module


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
