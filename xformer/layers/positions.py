"""Where a token stands in its sentence, told to the model in one of five ways.

Absolute schemes add a vector to each token's embedding: `Sinusoidal`, `LearnedPositions`. Relative ones act inside
self-attention: `Rotary` turns queries and keys, `ALiBi` and `RelativeBias` add a bias to the scores. Positions count
from 0; a relative scheme sees differences only, so any start will do.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple, Protocol

import numpy as np

from xformer.backends import (
    Array,
    Device,
    DType,
    Namespace,
    array_namespace,
    base_namespace,
    device,
    dtype_name,
    from_host,
)
from xformer.errors import ConfigError, ShapeError
from xformer.layers.initializer import Initializer
from xformer.ops.embedding import embedding
from xformer.tree import Module

_FEWEST_ROWS = 64


# --- Absolute: added to embeddings ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=16)
def _table(length: int, d_model: int, dtype: str) -> Array:
    """The table on the host, computed in float64 and rounded once."""
    position = np.reshape(np.arange(length, dtype=np.float64), (length, 1))
    even = np.arange(0, d_model, 2, dtype=np.float64)
    angle = position / 10000.0 ** (even / d_model)
    table = np.empty((length, d_model), dtype=np.float64)
    table[:, 0::2] = np.sin(angle)
    table[:, 1::2] = np.cos(angle)[:, : d_model // 2]  # an odd d_model has one sine more than cosines
    table = table.astype(dtype)
    table.flags.writeable = False  # every caller gets a view of it
    return table


def sinusoidal(
    length: int, d_model: int, *, start: int = 0, xp: Namespace, dtype: DType, device: Device = None
) -> Array:
    """Sines and cosines of the position, in wavelengths from 2 pi to 10000 * 2 pi (Vaswani et al., 2017, 3.5).

    Returns (length, d_model) for the positions start .. start + length - 1; even features hold sines, odd ones
    cosines.
    """
    # Tables have a power of two of rows, so that growing sentences share a few of them.
    rows = max(_FEWEST_ROWS, 1 << max(start + length - 1, 0).bit_length())
    name = dtype_name(dtype)
    table = _table(rows, d_model, "float32" if name in ("float16", "bfloat16") else name)
    return from_host(base_namespace(xp), table[start : start + length], dtype=dtype, device=device)


class Sinusoidal(Module):
    """Add the sinusoidal table to token vectors (Vaswani et al., 2017, section 3.5): nothing is learned."""

    d_model: int

    def __init__(self, d_model: int):
        self.d_model = d_model

    def __call__(self, x: Array, positions: Array | None = None, *, start: int = 0) -> Array:
        """x: (batch, length, d_model), at positions start, start + 1, ... or at `positions`, integers (batch, length)
        below `length`. Returns the same shape as x."""
        length = x.shape[1]
        table = sinusoidal(length, self.d_model, start=start, xp=array_namespace(x), dtype=x.dtype, device=device(x))
        return x + (table if positions is None else embedding(table, positions))


class LearnedPositions(Module):
    """Add a learned vector for each position up to max_positions (Gehring et al., 2017)."""

    weight: Array

    def __init__(self, max_positions: int, d_model: int, *, init: Initializer):
        self.weight = init.normal((max_positions, d_model), d_model**-0.5)

    def __call__(self, x: Array, positions: Array | None = None, *, start: int = 0) -> Array:
        """Shapes are those of Sinusoidal. Raises ShapeError when a sentence is longer than the table."""
        length = x.shape[1]
        if start + length > self.weight.shape[0]:
            raise ShapeError(
                f"a sentence has {start + length} tokens; this model has learned positions for {self.weight.shape[0]}: "
                "split the sentence, or train with more max_positions"
            )
        table = self.weight[start : start + length, :]
        return x + (table if positions is None else embedding(table, positions))


def remaining_length(remaining: Array, d_model: int, dtype: DType) -> Array:
    """Sinusoids of how many tokens are still to come (Takase and Okazaki, 2019: LDPE; they count characters).

    remaining: (batch, length) integers, below zero where an output is longer than was wanted. Returns
    (batch, length, d_model).
    """
    xp = array_namespace(remaining)
    wide = xp.float64 if dtype_name(dtype) == "float64" else xp.float32
    even = xp.arange(0, d_model, 2, dtype=wide, device=device(remaining))
    angle = xp.expand_dims(xp.astype(remaining, wide), axis=2) * xp.exp(even * (-math.log(10000.0) / d_model))
    pairs = xp.stack([xp.sin(angle), xp.cos(angle)], axis=3)  # (batch, length, d_model / 2 rounded up, 2)
    table = xp.reshape(pairs, (*remaining.shape, 2 * even.shape[0]))[:, :, :d_model]
    return xp.astype(table, dtype, copy=False)


# --- Relative: inside self-attention ----------------------------------------------------------------------------------


class Rotation(NamedTuple):
    """Angles by position, to turn queries and keys by: cosines and sines (length, head_dim / 2)."""

    cosine: Array
    sine: Array

    def __call__(self, x: Array) -> Array:
        """Turn the pairs of features (i, i + head_dim / 2): (batch, heads, length, head_dim) -> the same shape."""
        half = x.shape[-1] // 2
        xp = array_namespace(x)
        first, second = x[..., :half], x[..., half:]
        turned = (first * self.cosine - second * self.sine, second * self.cosine + first * self.sine)
        return xp.concat(turned, axis=-1)


class PositionTerms(NamedTuple):
    """What a relative scheme hands to self-attention: a rotation of queries and keys, or a bias for the scores."""

    rotation: Rotation | None = None
    bias: Array | None = None


class RelativePositions(Protocol):
    """A relative scheme."""

    def place(self, queries: int, keys: int, like: Array) -> PositionTerms:
        """For that many queries, of which the last stands at the last of the keys, in the dtype of `like`."""
        ...


def position_terms(positions: RelativePositions | None, queries: int, keys: int, like: Array) -> PositionTerms:
    """What a scheme hands to self-attention: nothing, where there is none."""
    return PositionTerms() if positions is None else positions.place(queries, keys, like)


class Rotary(Module):
    """Rotary position embedding (Su et al., 2021): the score of a query and a key depends on their distance.

    Features are paired half with half, as in GPT-NeoX and Llama, not neighbor with neighbor, as in the paper; the
    two differ by a permutation of the features.
    """

    head_dim: int
    base: float

    def __init__(self, head_dim: int, *, base: float = 10000.0):
        if head_dim % 2:
            raise ConfigError(f"rotary positions turn pairs of features; head_dim is {head_dim}, expected an even one")
        self.head_dim = head_dim
        self.base = base

    def place(self, queries: int, keys: int, like: Array) -> PositionTerms:
        """The rotation of the last `queries` of the positions 0 .. keys - 1."""
        return PositionTerms(rotation=self.rotation(queries, start=keys - queries, like=like))

    def rotation(self, length: int, *, start: int = 0, like: Array) -> Rotation:
        """The angles of the positions start .. start + length - 1, in the library and dtype of `like`."""
        frequency = self.base ** (-np.arange(0, self.head_dim, 2, dtype=np.float64) / self.head_dim)
        angle = np.arange(start, start + length, dtype=np.float64)[:, None] * frequency
        xp = base_namespace(array_namespace(like))
        place = device(like)
        return Rotation(*(from_host(xp, f(angle), dtype=like.dtype, device=place) for f in (np.cos, np.sin)))


class ALiBi(Module):
    """A penalty on the scores that grows with the distance, at a slope of each head's own (Press et al., 2022).

    Where later keys are visible too (in an encoder) the penalty is the same to both sides.
    """

    num_heads: int

    def __init__(self, num_heads: int):
        self.num_heads = num_heads

    @property
    def slopes(self) -> list[float]:
        """2^(-8 i / heads) for a power of two of heads; for others, every second slope of twice as many fills up."""
        whole = 1 << (self.num_heads.bit_length() - 1)
        slopes = [2.0 ** (-8.0 * i / whole) for i in range(1, whole + 1)]
        between = [2.0 ** (-4.0 * i / whole) for i in range(1, 2 * whole + 1, 2)]
        return slopes + between[: self.num_heads - whole]

    def place(self, queries: int, keys: int, like: Array) -> PositionTerms:
        """What to add to the scores: (heads, queries, keys)."""
        distance = abs(_distances(queries, keys))
        bias = -np.asarray(self.slopes, dtype=np.float64)[:, None, None] * distance
        xp = base_namespace(array_namespace(like))
        return PositionTerms(bias=from_host(xp, bias, dtype=like.dtype, device=device(like)))


class RelativeBias(Module):
    """A learned bias for each head and each bucket of distances (Raffel et al., 2020, section 2.1; T5).

    Half of the buckets hold one distance each, the others ever more of them, up to max_distance and beyond.
    bidirectional: keys after the query have buckets of their own (in an encoder).
    """

    weight: Array
    bidirectional: bool
    max_distance: int

    def __init__(
        self, num_heads: int, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128, init: Initializer
    ):
        self.weight = init.normal((num_buckets, num_heads), num_heads**-0.5)
        self.bidirectional = bidirectional
        self.max_distance = max_distance

    def place(self, queries: int, keys: int, like: Array) -> PositionTerms:
        """What to add to the scores: (heads, queries, keys)."""
        buckets = _buckets(_distances(queries, keys), self.weight.shape[0], self.max_distance, self.bidirectional)
        xp = array_namespace(self.weight)
        ids = from_host(base_namespace(xp), buckets, device=device(self.weight))
        return PositionTerms(bias=xp.permute_dims(embedding(self.weight, ids), (2, 0, 1)))


def _distances(queries: int, keys: int) -> Array:
    """Key position minus query position, on the host: (queries, keys)."""
    return np.arange(keys)[None, :] - np.arange(keys - queries, keys)[:, None]


def _buckets(distance: Array, num_buckets: int, max_distance: int, bidirectional: bool) -> Array:
    """The bucket of each distance, as T5 counts them: (queries, keys) integers on the host."""
    first = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first = np.where(distance > 0, num_buckets, 0)
        distance = abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    growth = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    # The tiny addition undoes rounding where a distance is exactly a bucket's first.
    far = exact + (growth * (num_buckets - exact) + 1e-9).astype(np.int64)
    return first + np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))
