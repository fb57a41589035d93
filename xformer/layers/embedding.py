"""Token embeddings and the input of the first layer."""

from __future__ import annotations

import math

from xformer.backends import Array, array_namespace, device, extra, is_floating
from xformer.config import check_bool
from xformer.layers.basic import Dropout, Init, Linear, Norm, as_dtype_of, initializer
from xformer.layers.positions import LearnedPositions, Sinusoidal
from xformer.ops.embedding import embedding
from xformer.ops.linear import linear
from xformer.ops.weights import InferenceWeight
from xformer.random import Rng
from xformer.tree import Module, check_array, wrong_array


class Embedding(Module):
    """Table of one vector per token (Vaswani et al., 2017, section 3.4).

    Args:
        vocab_size: Number of tokens.
        d_model: Features of a vector.
        scale: Multiply vectors by sqrt(d_model), as the paper does when input and output share the table.
        factor: Multiply vectors by this number, too.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.
    """

    weight: Array | InferenceWeight
    scale: bool
    factor: float

    def __init__(self, vocab_size: int, d_model: int, *, scale: bool = True, factor: float = 1.0, init: Init = None):
        # With this deviation, scaled vectors have unit variance and unembedded logits start near unit variance too.
        self.weight = initializer(init).normal((vocab_size, d_model), d_model**-0.5)
        self.scale = check_bool("scale", scale)
        self.factor = factor

    def __call__(self, ids: Array) -> Array:
        """Look up token vectors.

        Args:
            ids: Integers of shape (...) in [0, vocab_size). Or floating rows (..., vocab_size), one-hot or a mixture,
                which are multiplied by the table so that a gradient can flow back to them.

        Returns:
            Array of shape (..., d_model) in the dtype of the table.
        """
        check_array(ids, "ids")
        weight = self.weight
        scale = self.factor * (math.sqrt(weight.shape[1]) if self.scale else 1.0)
        if not is_floating(ids.dtype):
            return embedding(weight, ids, scale=scale)
        if not ids.shape or ids.shape[-1] != weight.shape[0]:
            raise wrong_array(ids, "ids has", f"integers, or floating rows of {weight.shape[0]} elements")
        vectors = linear(as_dtype_of(ids, weight), weight)
        return vectors if scale == 1.0 else extra.cast_like(vectors * scale, vectors)

    def unembed(self, x: Array) -> Array:
        """Compute logits with the same table (Press and Wolf, 2017).

        Args:
            x: Array of shape (..., d_model).

        Returns:
            Array of shape (..., vocab_size).
        """
        return linear(as_dtype_of(x, self.weight), self.weight.T)


class InputEmbedding(Module):
    """Turn token vectors into the input of the first layer: add positions, scale, normalize, apply dropout, project.

    Args:
        positions: Absolute positions to add.
        scale: Multiply by sqrt(d_model) after adding positions. Usually `Embedding` scales the token vectors alone.
        norm: Norm applied after that.
        norm_first: Apply the norm before positions are added (BlenderbotSmall).
        dropout: Dropout rate on the result.
        projection: Linear layer to d_model (ALBERT, ELECTRA); None if the token vectors have d_model features.
    """

    positions: Sinusoidal | LearnedPositions | None
    norm: Norm | None
    norm_first: bool
    dropout: Dropout
    scale: bool
    projection: Linear | None

    def __init__(
        self,
        *,
        positions: Sinusoidal | LearnedPositions | None = None,
        scale: bool = False,
        norm: Norm | None = None,
        norm_first: bool = False,
        dropout: float = 0.0,
        projection: Linear | None = None,
    ):
        self.positions, self.norm, self.projection = positions, norm, projection
        self.norm_first = check_bool("norm_first", norm_first)
        self.dropout = Dropout(dropout)
        self.scale = check_bool("scale", scale)

    def __call__(
        self,
        x: Array,
        positions: Array | None = None,
        *,
        start: int = 0,
        position_embeddings: Array | None = None,
        rng: Rng | None = None,
    ) -> Array:
        """Prepare token vectors for the first layer.

        Args:
            x: Token vectors (batch, length, d_model).
            positions: Integers (batch, length), the position of each token; default start, start + 1, ...
            start: Position of the first token.
            position_embeddings: Vectors to add, if they are known (see `position_embeddings`), in place of `positions`.
            rng: Draws dropout.

        Returns:
            Array of the shape of `x`, or with the features of `projection`.

        Raises:
            ShapeError: If `x` is not three-dimensional.
        """
        check_array(x, "x", "batch", "length", "d_model")
        if self.norm is not None and self.norm_first:
            x = self.norm(x)
        if position_embeddings is not None:
            x = x + position_embeddings
        elif self.positions is not None:
            x = self.positions(x, positions, start=start)
        if self.scale:
            x = extra.cast_like(x * math.sqrt(x.shape[-1]), x)
        if self.norm is not None and not self.norm_first:
            x = self.norm(x)
        x = self.dropout(x, rng)
        return x if self.projection is None else self.projection(x)

    def position_embeddings(self, length: int, like: Array) -> Array | None:
        """Return the vectors that are added at the first `length` positions.

        Args:
            length: Number of positions; of learned ones there may be fewer.
            like: Array (..., d_model) of the library, dtype and device.

        Returns:
            Array of shape (length, d_model), or None if the layer adds no positions.
        """
        if self.positions is None:
            return None
        if isinstance(self.positions, LearnedPositions):
            length = min(length, self.positions.weight.shape[0])
        zeros = array_namespace(like).zeros((1, length, like.shape[-1]), dtype=like.dtype, device=device(like))
        return self.positions(zeros)[0, :, :]
