"""The position-wise feed-forward network (Vaswani et al., 2017, section 3.3), plain or gated."""

from __future__ import annotations

from xformer.backends import Array
from xformer.layers.dropout import Dropout
from xformer.layers.initializer import Initializer
from xformer.layers.linear import Linear
from xformer.ops import activation as activation_named
from xformer.random import Rng
from xformer.tree import Module


class FeedForward(Module):
    """Expand to d_ff features, apply the activation, contract to d_model.

    dropout: on the activations, where torch's Transformer layers have it as well; the paper names none here.
    """

    expand: Linear
    contract: Linear
    dropout: Dropout
    activation: str

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str = "relu",
        bias: bool = True,
        dropout: float = 0.0,
        init: Initializer,
    ):
        self.expand = Linear(d_model, d_ff, bias=bias, init=init)
        self.contract = Linear(d_ff, d_model, bias=bias, init=init)
        self.dropout = Dropout(dropout)
        activation_named(activation)  # an unknown name raises here, not at the first call
        self.activation = activation

    def __call__(self, x: Array, rng: Rng | None = None) -> Array:
        """x: (..., d_model) -> (..., d_model)."""
        return self.contract(self.dropout(self.expand(x, self.activation), rng))


class GatedFeedForward(Module):
    """Expand twice, and let one half, through the activation, be the gate of the other (Shazeer, 2020).

    With "silu" this is SwiGLU, with "gelu" GEGLU. It has three matrices where FeedForward has two: for as many
    parameters, take two thirds of the d_ff.
    """

    gate: Linear
    expand: Linear
    contract: Linear
    dropout: Dropout
    activation: str

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: str = "silu",
        bias: bool = True,
        dropout: float = 0.0,
        init: Initializer,
    ):
        self.gate = Linear(d_model, d_ff, bias=bias, init=init)
        self.expand = Linear(d_model, d_ff, bias=bias, init=init)
        self.contract = Linear(d_ff, d_model, bias=bias, init=init)
        self.dropout = Dropout(dropout)
        activation_named(activation)
        self.activation = activation

    def __call__(self, x: Array, rng: Rng | None = None) -> Array:
        """x: (..., d_model) -> (..., d_model)."""
        gated = self.gate(x, self.activation) * self.expand(x)
        return self.contract(self.dropout(gated, rng))
