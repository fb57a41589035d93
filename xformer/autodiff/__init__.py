"""Differentiation as an Array API namespace; start with README.md in this folder."""

from xformer.autodiff import rules as rules
from xformer.autodiff.primitive import Implementation, Primitive
from xformer.autodiff.rule import composite, define, define_sequence, not_differentiable
from xformer.autodiff.transforms import checkpoint, grad, stop_gradient, value_and_grad, vjp

__all__ = [
    "Implementation",
    "Primitive",
    "checkpoint",
    "composite",
    "define",
    "define_sequence",
    "grad",
    "not_differentiable",
    "stop_gradient",
    "value_and_grad",
    "vjp",
]
