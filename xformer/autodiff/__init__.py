"""Differentiation as an Array API namespace; start with README.md in this folder."""

from xformer.autodiff import rules as rules
from xformer.autodiff.rule import decomposition, defvjp, defvjp_sequence, not_differentiable
from xformer.autodiff.transforms import grad, remat, stop_gradient, value_and_grad, vjp

__all__ = [
    "decomposition",
    "defvjp",
    "defvjp_sequence",
    "grad",
    "not_differentiable",
    "remat",
    "stop_gradient",
    "value_and_grad",
    "vjp",
]
