"""Activation functions."""

from xformer.ops.activations.definition import ACTIVATIONS, activation, gelu, gelu_tanh, relu, silu

__all__ = ["ACTIVATIONS", "activation", "gelu", "gelu_tanh", "relu", "silu"]
