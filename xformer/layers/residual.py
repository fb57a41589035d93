"""How a sublayer joins the residual stream: before it or after it comes the norm."""

from __future__ import annotations

from collections.abc import Callable

from xformer.backends import Array
from xformer.layers.dropout import Dropout
from xformer.layers.normalization import Norm
from xformer.random import Rng
from xformer.tree import Module

Sublayer = Callable[[Array], Array]


class PreNorm(Module):
    """x + dropout(f(norm(x))) (Xiong et al., 2020): trains without a careful warm-up."""

    norm: Norm
    dropout: Dropout

    def __init__(self, norm: Norm, *, dropout: float = 0.0):
        self.norm = norm
        self.dropout = Dropout(dropout)

    def __call__(self, x: Array, sublayer: Sublayer, rng: Rng | None = None) -> Array:
        """x: (batch, length, d_model) -> the same shape."""
        return x + self.dropout(sublayer(self.norm(x)), rng)


class PostNorm(Module):
    """norm(x + dropout(f(x))), the paper's own (Vaswani et al., 2017, section 3.1)."""

    norm: Norm
    dropout: Dropout

    def __init__(self, norm: Norm, *, dropout: float = 0.0):
        self.norm = norm
        self.dropout = Dropout(dropout)

    def __call__(self, x: Array, sublayer: Sublayer, rng: Rng | None = None) -> Array:
        """x: (batch, length, d_model) -> the same shape."""
        return self.norm(x + self.dropout(sublayer(x), rng))


Residual = PreNorm | PostNorm
