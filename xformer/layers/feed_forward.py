"""The position-wise feed-forward network (Vaswani et al., 2017, section 3.3), plain or gated."""

from __future__ import annotations

from typing import Any

from xformer.backends import Array
from xformer.layers.dropout import Dropout
from xformer.layers.initializer import Init, initializer
from xformer.layers.linear import Linear
from xformer.ops import activation as activation_named
from xformer.random import Rng
from xformer.tree import Module


class FeedForward(Module):
    """Two linear maps with an activation in between, `down(activation(up(x)))` (Vaswani et al., 2017, section 3.3).

    Args:
        d_model: Features of the input and output.
        d_ff: Features in between.
        activation: "relu", "gelu", "gelu_tanh" or "silu".
        bias: Add learned biases.
        dropout: Dropout rate on the activations, as in torch's Transformer layers; the paper has none here.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.

    Raises:
        ConfigError: For an unknown activation.
    """

    up: Linear
    down: Linear
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
        init: Init = None,
    ):
        init = initializer(init)
        self.up = Linear(d_model, d_ff, bias=bias, init=init)
        self.down = Linear(d_ff, d_model, bias=bias, init=init)
        self.dropout = Dropout(dropout)
        activation_named(activation)  # an unknown name raises here, not at the first call
        self.activation = activation

    def __call__(self, x: Array, rng: Rng | None = None) -> Array:
        """Apply the network to each position.

        Args:
            x: Array of shape (..., d_model).
            rng: Draws dropout; None switches it off.

        Returns:
            Array of shape (..., d_model).
        """
        return self.down(self.dropout(self.up(x, self.activation), rng))


class GatedFeedForward(FeedForward):
    """Gated linear unit, `down(activation(gate(x)) * up(x))` (Shazeer, 2020).

    "silu" gives SwiGLU, "gelu" GEGLU. The layer has three matrices; with two thirds of the d_ff of a `FeedForward` it
    has as many parameters. Arguments are those of `FeedForward`; the default activation is "silu".
    """

    gate: Linear

    def __init__(self, d_model: int, d_ff: int, *, activation: str = "silu", init: Init = None, **options: Any):
        init = initializer(init)
        self.gate = Linear(d_model, d_ff, bias=options.get("bias", True), init=init)
        super().__init__(d_model, d_ff, activation=activation, init=init, **options)

    def __call__(self, x: Array, rng: Rng | None = None) -> Array:
        """Apply the network to each position; arguments are those of `FeedForward`."""
        gated = self.gate(x, self.activation) * self.up(x)
        return self.down(self.dropout(gated, rng))
