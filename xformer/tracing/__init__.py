"""Derivatives and programs of functions, recorded by Array API namespaces; start with README.md in this folder."""

from xformer.tracing import rules as rules
from xformer.tracing.forward import hvp, jvp
from xformer.tracing.grad import grad, remat, stop_gradient, value_and_grad, vjp
from xformer.tracing.jit import jit
from xformer.tracing.rule import decomposition, defvjp, defvjp_sequence, not_differentiable
from xformer.tracing.vmap import hessian, jacobian, scan, vmap

__all__ = [
    "decomposition", "defvjp", "defvjp_sequence", "grad", "hessian", "hvp", "jacobian", "jit", "jvp",
    "not_differentiable", "remat", "scan", "stop_gradient", "value_and_grad", "vjp", "vmap",
]  # fmt: skip
