"""Tokens in, features out, and back."""

from __future__ import annotations

import math

from xformer.backends import Array, array_namespace, device, extra, is_floating
from xformer.errors import ShapeError
from xformer.layers.dropout import Dropout
from xformer.layers.initializer import Initializer
from xformer.layers.normalization import Norm
from xformer.layers.positions import LearnedPositions, Sinusoidal
from xformer.ops.embedding import embedding
from xformer.ops.linear import linear
from xformer.random import Rng
from xformer.tree import Module


class Embedding(Module):
    """A table of one vector a token (Vaswani et al., 2017, section 3.4).

    scale: multiply vectors by sqrt(d_model), as the paper does when the table is shared with the output.
    """

    weight: Array
    scale: bool

    def __init__(self, vocab_size: int, d_model: int, *, scale: bool = True, init: Initializer):
        # With this deviation, scaled vectors have unit variance and unembedded logits start near unit variance too.
        self.weight = init.normal((vocab_size, d_model), d_model**-0.5)
        self.scale = scale

    def __call__(self, ids: Array) -> Array:
        """ids: (...) integers in [0, vocab_size), or one-hot rows (..., vocab_size), floating -> (..., d_model).

        Rows need not be one-hot: they are mixed as they say, which lets a gradient flow back to them.
        """
        vectors = linear(ids, self.weight) if is_floating(ids.dtype) else embedding(self.weight, ids)
        return extra.cast_like(vectors * math.sqrt(self.weight.shape[1]), vectors) if self.scale else vectors

    def unembed(self, x: Array) -> Array:
        """Logits of every token, by the same table (Press and Wolf, 2017): (..., d_model) -> (..., vocab_size)."""
        return linear(x, array_namespace(self.weight).matrix_transpose(self.weight))


class InputEmbedding(Module):
    """What becomes of token vectors before the first layer: positions, scale, norm, dropout, in this order.

    scale: multiply vectors and positions, once added, by sqrt(d_model); usually the table scales vectors alone.
    """

    positions: Sinusoidal | LearnedPositions | None
    norm: Norm | None
    dropout: Dropout
    scale: bool

    def __init__(
        self,
        *,
        positions: Sinusoidal | LearnedPositions | None = None,
        scale: bool = False,
        norm: Norm | None = None,
        dropout: float = 0.0,
    ):
        self.positions = positions
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.scale = scale

    def __call__(
        self,
        x: Array,
        positions: Array | None = None,
        *,
        start: int = 0,
        position_embeddings: Array | None = None,
        rng: Rng | None = None,
    ) -> Array:
        """x: token vectors (batch, length, d_model), at `positions` (batch, length) or from `start` on;
        position_embeddings: what those positions add, if it is known. Returns the same shape."""
        if len(x.shape) != 3:
            raise ShapeError(f"token vectors have shape {tuple(x.shape)}; expected (batch, length, d_model)")
        if position_embeddings is not None:
            x = x + position_embeddings
        elif self.positions is not None:
            x = self.positions(x, positions, start=start)
        if self.scale:
            x = extra.cast_like(x * math.sqrt(x.shape[-1]), x)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x, rng)

    def position_embeddings(self, length: int, like: Array) -> Array | None:
        """What the first so many positions add to token vectors, (length, d_model); None where they add nothing.

        like: an array (..., d_model) of the library, dtype and device.
        """
        if self.positions is None:
            return None
        xp = array_namespace(like)
        nothing = xp.zeros((1, length, like.shape[-1]), dtype=like.dtype, device=device(like))
        return self.positions(nothing)[0, :, :]
