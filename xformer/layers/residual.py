"""How a sublayer joins the residual stream: pre-norm or post-norm."""

from __future__ import annotations

from collections.abc import Callable

from xformer.layers.dropout import Dropout
from xformer.layers.initializer import Initializer
from xformer.layers.normalization import LayerNorm
from xformer.namespace import Array
from xformer.random import Rng
from xformer.tree import Module


class Residual(Module):
    """Wrap a sublayer f with a residual connection, dropout and a norm.

    Pre-norm (Xiong et al., 2020): x + dropout(f(norm(x))), which trains without a careful warm-up.
    Post-norm (Vaswani et al., 2017, section 3.1): norm(x + dropout(f(x))), the paper's own.
    """

    norm: LayerNorm
    dropout: Dropout
    pre_norm: bool

    def __init__(self, d_model: int, *, pre_norm: bool, dropout: float = 0.0, epsilon: float = 1e-5, init: Initializer):
        self.norm = LayerNorm(d_model, epsilon=epsilon, init=init)
        self.dropout = Dropout(dropout)
        self.pre_norm = pre_norm

    def __call__(self, x: Array, sublayer: Callable[[Array], Array], rng: Rng | None = None) -> Array:
        """x: (batch, length, d_model) -> the same shape."""
        if self.pre_norm:
            return x + self.dropout(sublayer(self.norm(x)), rng)
        return self.norm(x + self.dropout(sublayer(x), rng))
