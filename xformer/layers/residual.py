"""Residual connections around sublayers, with the norm before the sublayer, after it, or both."""

from __future__ import annotations

from collections.abc import Callable

from xformer.backends import Array
from xformer.layers.dropout import Dropout
from xformer.layers.normalization import Norm
from xformer.random import Rng
from xformer.tree import Module

Sublayer = Callable[[Array], Array]


class Residual(Module):
    """Residual connection around a sublayer, with a norm and dropout.

    Args:
        norm: Norm of the input of the sublayer (`PreNorm`) or of the sum (`PostNorm`).
        dropout: Dropout rate on the output of the sublayer.
    """

    norm: Norm
    dropout: Dropout

    def __init__(self, norm: Norm, *, dropout: float = 0.0):
        self.norm = norm
        self.dropout = Dropout(dropout)

    def __call__(self, x: Array, sublayer: Sublayer, rng: Rng | None = None) -> Array:
        """Apply a sublayer with its residual connection.

        Args:
            x: Array of shape (batch, length, d_model).
            sublayer: Function of an array that returns one of the same shape.
            rng: Draws dropout.

        Returns:
            Array of the shape of `x`.
        """
        raise NotImplementedError


class PreNorm(Residual):
    """Pre-norm residual connection, `x + dropout(f(norm(x)))` (Xiong et al., 2020).

    It trains without a careful warm-up. Arguments are those of `Residual`.
    """

    def __call__(self, x: Array, sublayer: Sublayer, rng: Rng | None = None) -> Array:
        """Apply a sublayer; see `Residual`."""
        return x + self.dropout(sublayer(self.norm(x)), rng)


class PostNorm(Residual):
    """Post-norm residual connection, `norm(x + dropout(f(x)))` (Vaswani et al., 2017, section 3.1).

    Arguments are those of `Residual`.
    """

    def __call__(self, x: Array, sublayer: Sublayer, rng: Rng | None = None) -> Array:
        """Apply a sublayer; see `Residual`."""
        return self.norm(x + self.dropout(sublayer(x), rng))


class SandwichNorm(Residual):
    """Residual connection with two norms, `x + dropout(norm_after(f(norm(x))))` (Ding et al., 2021, section 2.3).

    Args:
        norm: Norm of the input of the sublayer.
        norm_after: Norm of its output.
        dropout: Dropout rate on the normalized output.
    """

    norm_after: Norm

    def __init__(self, norm: Norm, norm_after: Norm, *, dropout: float = 0.0):
        self.norm = norm
        self.norm_after = norm_after
        self.dropout = Dropout(dropout)

    def __call__(self, x: Array, sublayer: Sublayer, rng: Rng | None = None) -> Array:
        """Apply a sublayer; see `Residual`."""
        return x + self.dropout(self.norm_after(sublayer(self.norm(x))), rng)
