"""The affine layer."""

from __future__ import annotations

from xformer.backends import Array
from xformer.layers.initializer import Initializer
from xformer.ops.linear import linear
from xformer.tree import Module


class Linear(Module):
    """x @ weight + bias, with the weight stored (in_features, out_features). Xavier-uniform, zero bias at first."""

    weight: Array
    bias: Array | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, init: Initializer):
        self.weight = init.xavier_uniform((in_features, out_features))
        self.bias = init.zeros((out_features,)) if bias else None

    def __call__(self, x: Array, activation: str | None = None) -> Array:
        """x: (..., in_features) -> (..., out_features); activation: the name of the function to apply, if any."""
        return linear(x, self.weight, self.bias, activation=activation)
