"""Tokens in, features out, and back."""

from __future__ import annotations

import math

from xformer.layers.initializer import Initializer
from xformer.namespace import Array, array_namespace
from xformer.ops.embedding import embedding
from xformer.ops.linear import linear
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
        """ids: (...) integers in [0, vocab_size) -> (..., d_model)."""
        vectors = embedding(self.weight, ids)
        return vectors * math.sqrt(self.weight.shape[1]) if self.scale else vectors

    def unembed(self, x: Array) -> Array:
        """Logits of every token, by the same table (Press and Wolf, 2017): (..., d_model) -> (..., vocab_size)."""
        return linear(x, array_namespace(self.weight).matrix_transpose(self.weight))
