"""Activation functions."""

from xformer.ops.activations.definition import (
    ACTIVATIONS,
    activation,
    gelu,
    gelu_tanh,
    quick_gelu,
    relu,
    relu_squared,
    silu,
)

__all__ = ["ACTIVATIONS", "activation", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu_squared", "silu"]
