"""Positional encodings.

Absolute positions add a vector to each token's embedding: `Sinusoidal`, `LearnedPositions`. Relative positions act
inside self-attention: `Rotary` rotates queries and keys, `ALiBi` and `RelativeBias` add a bias to the scores. Positions
count from 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from xformer.backends import Array, Device, DType, Namespace, array_namespace, device, dtype_name, resolve
from xformer.backends.dtypes import is_half_precision
from xformer.errors import ConfigError, ShapeError, check_choice
from xformer.layers.basic import Init, Norm, as_dtype_of, initializer
from xformer.ops.embedding import embedding, rotate
from xformer.tree import Module, check_array

_MIN_TABLE_ROWS = 64


# --- Absolute: added to embeddings ------------------------------------------------------------------------------------


# Order of the features: sines and cosines in turn (the paper); all sines, then all cosines (Marian); the same with the
# wavelengths and the first position (2) of fairseq.
SINUSOIDAL_LAYOUTS = ("interleaved", "halves", "fairseq")


def _cached(compute: Callable[..., Any]) -> Callable[..., Any]:
    """Keep the read-only tables that a function returns; torch.compile takes no function of functools as a constant."""
    tables: dict[Any, Any] = {}  # few: see `_table_rows`

    @functools.wraps(compute)
    def table(*arguments: Any) -> Any:
        if arguments not in tables:
            tables[arguments] = compute(*arguments)
            tables[arguments].flags.writeable = False  # callers get views of it
        return tables[arguments]

    return table


def _powers(base: float, exponents: Any) -> Any:
    """Compute powers by the C library: those of NumPy depend on the processor, and far positions scale the error."""
    try:
        return np.asarray([math.pow(base, exponent) for exponent in exponents.tolist()])
    except ValueError as error:
        raise ArithmeticError(f"{base} has no such powers") from error


@_cached
def _sinusoidal_table(length: int, d_model: int, dtype: str, layout: str) -> Array:
    """Compute the table on the host in float64 and round it once."""
    position = np.arange(length, dtype=np.float64)[:, None]
    exponent = np.arange(0, d_model, 2, dtype=np.float64) / d_model
    if layout == "fairseq":
        position, exponent = position + 2.0, np.linspace(0.0, 1.0, d_model // 2)
    angle = position / _powers(10000.0, exponent)
    sine, cosine = np.sin(angle), np.cos(angle)
    table = np.zeros((length, d_model), dtype=np.float64)
    if layout == "interleaved":
        table[:, 0::2] = sine
        table[:, 1::2] = cosine[:, : d_model // 2]  # an odd d_model has one more sine than cosines
    else:
        table[:, : sine.shape[1]] = sine
        table[:, sine.shape[1] : 2 * sine.shape[1]] = cosine[:, : d_model - sine.shape[1]]
    return table.astype(dtype)


def sinusoidal(
    length: int,
    d_model: int,
    *,
    start: int = 0,
    layout: str = "interleaved",
    xp: Namespace,
    dtype: DType,
    device: Device = None,
) -> Array:
    """Return sinusoidal position encodings (Vaswani et al., 2017, section 3.5).

    Wavelengths go from 2 pi to 10000 * 2 pi; even features hold sines, odd ones cosines, unless `layout` differs.

    Args:
        length: Number of positions.
        d_model: Number of features.
        start: First position.
        layout: "interleaved"; "halves" for all sines before all cosines; "fairseq" for halves with exponents up to
            and including 1, and positions that count from 2.
        xp: Array library.
        dtype: Floating dtype of the result.
        device: Device of the result.

    Returns:
        Array of shape (length, d_model), for the positions start .. start + length - 1.
    """
    if length < 0:
        raise ConfigError(f"length is {length}; expected at least 0")
    name = "float32" if is_half_precision(dtype) else dtype_name(dtype)
    table = _sinusoidal_table, (_table_rows(start + length), d_model, name, layout)
    return resolve(xp).rows_of_table(table, slice(start, start + length), dtype, device)


def _table_rows(length: int) -> int:
    """Return a power of two that is at least `length`: growing inputs share a few tables."""
    rows = _MIN_TABLE_ROWS
    while rows < length:  # torch.compile traces it for any length
        rows *= 2
    return rows


class Sinusoidal(Module):
    """Add sinusoidal position encodings (Vaswani et al., 2017, section 3.5); no parameters.

    Args:
        d_model: Features of a token.
        layout: As for `sinusoidal`.

    Raises:
        ConfigError: For an unknown layout.
    """

    d_model: int
    layout: str

    def __init__(self, d_model: int, *, layout: str = "interleaved"):
        check_choice("layout", layout, SINUSOIDAL_LAYOUTS)
        self.d_model, self.layout = d_model, layout

    def __call__(self, x: Array, positions: Array | None = None, *, start: int = 0) -> Array:
        """Add position encodings to token vectors.

        Args:
            x: Token vectors (batch, length, d_model).
            positions: Integers (batch, length) in [0, length), the position of each token; default start, start + 1,
                ...
            start: Position of the first token.

        Returns:
            Array of the shape of `x`.
        """
        _, length, _ = check_array(x, "x", "batch", "length", self.d_model)
        options: Any = {"layout": self.layout, "xp": array_namespace(x), "dtype": x.dtype, "device": device(x)}
        return x + _rows_at(sinusoidal(length, self.d_model, start=start, **options), positions)


class LearnedPositions(Module):
    """Add a learned vector for each position (Gehring et al., 2017).

    Args:
        max_positions: Number of positions.
        d_model: Features of a token.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.
    """

    weight: Array

    def __init__(self, max_positions: int, d_model: int, *, init: Init = None):
        self.weight = initializer(init).normal((max_positions, d_model), d_model**-0.5)

    def __call__(self, x: Array, positions: Array | None = None, *, start: int = 0) -> Array:
        """Add learned vectors to token vectors; arguments are those of `Sinusoidal`.

        Raises:
            ShapeError: If an input is longer than max_positions.
        """
        max_positions, d_model = self.weight.shape
        _, length, _ = check_array(x, "x", "batch", "length", d_model)
        if start + length > max_positions:
            raise ShapeError(
                f"a sentence has {start + length} tokens; this model has learned positions for {max_positions}: "
                "split the sentence, or train with more max_positions"
            )
        table = self.weight[start : start + length, :]
        return as_dtype_of(x, table) + _rows_at(table, positions)


def _rows_at(table: Array, positions: Array | None) -> Array:
    """Return the rows of a table (length, d_model) at positions (batch, length), or the table itself.

    That of documents, (batch, length, d_model), may depend on their lengths, too, and has the rows of the first column.
    """
    if positions is None or len(table.shape) == 3:
        return table
    check_array(positions, "positions", "batch", table.shape[0])
    return embedding(table, positions)


def remaining_length(remaining: Array, d_model: int, dtype: DType) -> Array:
    """Return sinusoidal encodings of the number of tokens still to come (Takase and Okazaki, 2019, LDPE).

    The paper counts characters.

    Args:
        remaining: Integers (batch, length); negative where an output is longer than requested.
        d_model: Number of features.
        dtype: Floating dtype of the result.

    Returns:
        Array of shape (batch, length, d_model).
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
    """Rotation angles of queries and keys by position.

    Attributes:
        cosine: Cosines (length, features / 2), where features is the number of rotated features of a head; or
            (batch, length, features / 2) if they differ between rows.
        sine: Sines of the same shape.
    """

    cosine: Array
    sine: Array

    def at(self, positions: Array) -> Rotation:
        """Return the angles of the positions (batch, length) of each row, in [0, length)."""
        return Rotation(*(_rows_at(angle, positions) for angle in self))

    def __call__(self, x: Array) -> Array:
        """Rotate the pairs of features (i, i + features / 2); features beyond the rotated ones pass unchanged.

        Args:
            x: Array of shape (batch, heads, length, head_dim).

        Returns:
            Array of the same shape.
        """
        if len(self.cosine.shape) == 2:
            return rotate(x, self.cosine, self.sine)
        xp, (batch, heads, length, head_dim) = array_namespace(x), x.shape
        # The positions of all rows become those of one text.
        text = xp.reshape(xp.permute_dims(x, (1, 0, 2, 3)), (1, heads, batch * length, head_dim))
        angles = (xp.reshape(angle, (batch * length, angle.shape[2])) for angle in self)
        rows = xp.reshape(rotate(text, *angles), (heads, batch, length, head_dim))
        return xp.permute_dims(rows, (1, 0, 2, 3))


class PositionTerms(NamedTuple):
    """Contribution of relative positions to self-attention; the fields are arguments of `MultiHeadAttention`.

    Attributes:
        rotation: Rotation of queries and keys.
        bias: Bias added to the scores, (heads, queries, keys).
    """

    rotation: Rotation | None = None
    bias: Array | None = None


class RelativePositions(Protocol):
    """Protocol of relative positional encodings."""

    def terms(self, queries: int, keys: int, like: Array, sizes: Array | None = None) -> PositionTerms:
        """Return the terms of self-attention; a bias depends only on the distance.

        Args:
            queries: Number of queries; the last one is at the position of the last key.
            keys: Number of keys.
            like: Array of the library, dtype and device.
            sizes: Length of the text that each query is part of, integers of a shape that broadcasts to
                (rows, queries, 1) or (queries, 1); default `keys`.
        """
        ...


def position_terms(
    positions: RelativePositions | None, queries: int, keys: int, like: Array, sizes: Array | None = None
) -> PositionTerms:
    """Return the terms of an encoding, or empty terms for None; arguments are those of `RelativePositions.terms`."""
    return PositionTerms() if positions is None else positions.terms(queries, keys, like, sizes)


class Rotary(Module):
    """Rotary position embedding (Su et al., 2021): the score of a query and a key depends on their distance.

    Feature i is paired with i + head_dim / 2, as in GPT-NeoX and Llama; the paper pairs neighbors. The two differ by a
    permutation of the features.

    Args:
        head_dim: Features of a head; even.
        base: Base of the wavelengths, theta in the paper.
        features: Number of features to rotate; the others pass unchanged. Even; default all.
        scaling: Change of the wavelengths for long texts, with the keys of Hugging Face: "rope_type" is "linear",
            "llama3", "yarn" or "longrope"; the other keys are those of the type (see `rope_frequencies`).

    Raises:
        ConfigError: If the number of features is odd or above head_dim, or for an unknown or incomplete scaling.
    """

    head_dim: int
    base: float
    features: int
    scaling: dict[str, Any] | None

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        features: int | None = None,
        scaling: dict[str, Any] | None = None,
    ):
        self.head_dim, self.base, self.scaling = head_dim, base, scaling
        self.features = head_dim if features is None else features
        if self.features % 2 or self.features > head_dim:
            name = "head_dim" if features is None else "features"
            raise ConfigError(f"{name} is {self.features}; expected an even number of at most head_dim, {head_dim}")
        _check_scaling(scaling or {})
        try:
            frequencies, _ = rope_frequencies(self.features, base, scaling, 1)
            is_valid = bool(np.all(np.isfinite(frequencies) & (frequencies > 0)))
        except ArithmeticError:
            is_valid = False
        if not is_valid:
            raise ConfigError(f"rotary positions of base {base} and scaling {scaling!r:.200} have infinite wavelengths")

    def terms(self, queries: int, keys: int, like: Array, sizes: Array | None = None) -> PositionTerms:
        """Return the rotation of the last `queries` of `keys` positions; see `RelativePositions.terms`."""
        return PositionTerms(rotation=self.rotation(queries, start=keys - queries, like=like, sizes=sizes))

    def rotation(self, length: int, *, start: int = 0, like: Array, sizes: Array | None = None) -> Rotation:
        """Return the angles of consecutive positions.

        Args:
            length: Number of positions.
            start: First position.
            like: Array of the library, dtype and device.
            sizes: Length of the text of each position, as for `RelativePositions.terms`; default start + length.
        """
        xp, end = array_namespace(like).library, start + length
        name = "float64" if is_half_precision(like.dtype) else dtype_name(like.dtype)
        scaling = tuple((key, tuple(x) if isinstance(x, list) else x) for key, x in (self.scaling or {}).items())

        def rows(function: str, num_positions: int) -> Array:
            wavelengths = self.features, self.base, scaling, num_positions
            table = _rotary_table, (function, _table_rows(end), wavelengths, name)
            return xp.rows_of_table(table, slice(start, end), like.dtype, device(like))

        if self.scaling is None or self.scaling.get("rope_type") != "longrope":
            return Rotation(rows("cos", 1), rows("sin", 1))
        short = self.scaling["original_max_position_embeddings"]
        # An array: other lengths may use the same graph.
        is_long = (xp.asarray(end, device=device(like)) if sizes is None else sizes) > short
        cosine, sine = (
            xp.where(is_long, rows(function, short + 1), rows(function, short)) for function in ("cos", "sin")
        )
        return Rotation(cosine, sine)


@_cached
def _rotary_table(function: str, rows: int, wavelengths: tuple[Any, ...], dtype: str) -> Array:
    """Compute cosines or sines of rotary positions on the host in float64 and round them once."""
    features, base, scaling, num_positions = wavelengths
    frequencies, magnitude = rope_frequencies(features, base, dict(scaling) or None, num_positions)
    angle = np.arange(rows, dtype=np.float64)[:, None] * frequencies
    return (magnitude * getattr(np, function)(angle)).astype(dtype)


def rope_frequencies(features: int, base: float, scaling: dict[str, Any] | None, length: int) -> tuple[Any, float]:
    """Compute the angular frequencies of rotary positions, as transformers does in modeling_rope_utils.py.

    Args:
        features: Number of rotated features.
        base: Base of the wavelengths.
        scaling: As for `Rotary`. "linear": factor. "llama3": factor, low_freq_factor, high_freq_factor,
            original_max_position_embeddings. "yarn" (Peng et al., 2023): factor, original_max_position_embeddings, and
            optionally beta_fast, beta_slow, attention_factor, mscale, mscale_all_dim, truncate. "longrope" (Ding et
            al., 2024): short_factor, long_factor, original_max_position_embeddings and factor or attention_factor.
        length: Number of positions of the text, which selects the factors of "longrope".

    Returns:
        Frequencies in radians per position, (features / 2,) float64, and the factor of cosines and sines.

    Raises:
        ConfigError: For an unknown type or a missing key.
    """
    frequencies = _powers(base, -np.arange(0, features, 2, dtype=np.float64) / features)
    rope_type = "default" if scaling is None else scaling.get("rope_type", "default")
    if scaling is None or rope_type == "default":
        return frequencies, 1.0
    try:
        if rope_type == "linear":
            return frequencies / scaling["factor"], 1.0
        if rope_type == "llama3":
            return _llama3_frequencies(frequencies, scaling), 1.0
        if rope_type == "yarn":
            return _yarn_frequencies(frequencies, features, base, scaling)
        if rope_type == "longrope":
            return _longrope_frequencies(frequencies, scaling, length)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"rope_scaling of type {rope_type!r} lacks {error}") from error
    raise ConfigError(f"rope_type is {rope_type!r}; expected one of default, linear, llama3, yarn, longrope")


def _check_scaling(scaling: dict[str, Any]) -> None:
    for key, value in scaling.items():
        numbers = value if isinstance(value, list | tuple) else [value]
        if key not in ("rope_type", "truncate") and value is not None and not all(map(_is_positive, numbers)):
            raise ConfigError(f"rope_scaling has {key} {value!r:.60}; expected numbers above 0")
    low, high = (scaling.get(f"{name}_freq_factor") for name in ("low", "high"))
    if low is not None and high is not None and low >= high:
        raise ConfigError(f"rope_scaling has low_freq_factor {low} and high_freq_factor {high}; expected low < high")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30


def _llama3_frequencies(frequencies: Any, scaling: dict[str, Any]) -> Any:
    """Divide low frequencies by the factor, keep high ones, and interpolate between them."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequencies / (2.0 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling["factor"] + kept * frequencies


def _yarn_frequencies(frequencies: Any, features: int, base: float, scaling: dict[str, Any]) -> tuple[Any, float]:
    """Interpolate between divided and original frequencies along the features, and raise the magnitude."""
    factor, positions = scaling["factor"], scaling["original_max_position_embeddings"]

    def feature_of(turns: float) -> float:
        return float(features * math.log(positions / (turns * 2.0 * math.pi)) / (2.0 * math.log(base)))

    low, high = feature_of(scaling.get("beta_fast") or 32.0), feature_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, features - 1)
    divided = np.clip((np.arange(features // 2) - low) / max(high - low, 0.001), 0.0, 1.0)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = magnitude(mscale) / magnitude(all_dim) if mscale and all_dim else magnitude(1.0)
    return divided * frequencies / factor + (1.0 - divided) * frequencies, float(attention_factor)


def _longrope_frequencies(frequencies: Any, scaling: dict[str, Any], length: int) -> tuple[Any, float]:
    """Divide each frequency by its own factor: there is one list for short texts and one for long ones."""
    positions = scaling["original_max_position_embeddings"]
    factors = scaling["long_factor" if length > positions else "short_factor"]
    if len(factors) != len(frequencies):
        received = f"rope_scaling has {len(factors)} factors"
        raise ConfigError(f"{received}; expected {len(frequencies)}, one for every two rotated features")
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        factor = scaling["factor"]
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(positions))
    return frequencies / np.asarray(factors, dtype=np.float64), float(attention_factor)


class ALiBi(Module):
    """Attention with linear biases (Press et al., 2022).

    The scores get a penalty proportional to the distance, with one slope per head. Without a causal mask the penalty is
    symmetric.

    Args:
        num_heads: Number of heads.
        scale: Factor of the slopes.
        signed: Give keys after the query a bonus instead of a penalty, as the formula gives without a causal mask.
    """

    num_heads: int
    scale: float
    signed: bool

    def __init__(self, num_heads: int, *, scale: float = 1.0, signed: bool = False):
        self.num_heads, self.scale, self.signed = num_heads, scale, signed

    @property
    def slopes(self) -> list[float]:
        """Slopes of the heads, scale * 2^(-8 i / heads) for a power of two.

        For other numbers of heads, every second slope of the next power of two fills up.
        """
        power = 1 << (self.num_heads.bit_length() - 1)
        slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
        between = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power + 1, 2)]
        return [self.scale * slope for slope in slopes + between[: self.num_heads - power]]

    def terms(self, queries: int, keys: int, like: Array, sizes: Array | None = None) -> PositionTerms:
        """Return the bias (heads, queries, keys); see `RelativePositions.terms`."""
        xp = array_namespace(like).library
        slopes = _alibi_table, (_table_rows(keys), tuple(self.slopes), dtype_name(like.dtype))
        table = xp.rows_of_table(slopes, slice(None), like.dtype, device(like))
        distances = _distances(xp, queries, keys, device(like))
        bias = xp.take(table, xp.reshape(xp.abs(distances), (queries * keys,)), axis=1)
        bias = xp.reshape(bias, (self.num_heads, queries, keys))
        return PositionTerms(bias=xp.where(distances > 0, -bias, bias) if self.signed else bias)


@_cached
def _alibi_table(rows: int, slopes: tuple[float, ...], dtype: str) -> Array:
    """Compute the bias of each head and distance, (heads, rows), in float64 and round it once."""
    bias = -np.asarray(slopes)[:, None] * np.arange(rows)
    return bias.astype("float64" if dtype in ("float16", "bfloat16") else dtype)


def _received(num_buckets: int, max_distance: int) -> str:
    return f"{num_buckets} buckets of relative positions and a max_distance of {max_distance}"


class RelativeBias(Module):
    """A learned bias for each head and bucket of distances (Raffel et al., 2020, section 2.1; T5).

    Half of the buckets hold one distance each; the others grow logarithmically up to max_distance.

    Args:
        num_heads: Number of heads.
        bidirectional: Give keys after the query separate buckets, as in an encoder.
        num_buckets: Number of buckets.
        max_distance: Distance from which all keys share a bucket.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.

    Raises:
        ConfigError: If there are too few buckets, or max_distance is not above the distances with their own bucket.
    """

    weight: Array
    bidirectional: bool
    max_distance: int

    def __init__(
        self, num_heads: int, *, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128, init: Init = None
    ):
        least = 4 if bidirectional else 2
        if not 0 < (exact := num_buckets // least) < max_distance:
            expected = f"at least {least} buckets and a max_distance above {exact}"
            raise ConfigError(f"{_received(num_buckets, max_distance)}; expected {expected}")
        self.weight = initializer(init).normal((num_buckets, num_heads), num_heads**-0.5)
        self.bidirectional, self.max_distance = bidirectional, max_distance

    def terms(self, queries: int, keys: int, like: Array, sizes: Array | None = None) -> PositionTerms:
        """Return the bias (heads, queries, keys); see `RelativePositions.terms`."""
        xp, rows = array_namespace(self.weight), _table_rows(keys)
        base, at = xp.library, device(self.weight)
        arguments = rows, self.weight.shape[0], self.max_distance, self.bidirectional
        table = base.rows_of_table((_bucket_table, arguments), slice(None), None, at)
        distances = base.reshape(_distances(base, queries, keys, at), (queries * keys,))
        buckets = base.reshape(base.take(table, distances + (rows - 1), axis=0), (queries, keys))
        return PositionTerms(bias=xp.permute_dims(embedding(self.weight, buckets), (2, 0, 1)))


class RelativeEmbedding(Module):
    """A learned vector for each bucket of distances, for disentangled attention (He et al., 2021, section 3.1).

    Half of the buckets hold one distance each; the others grow logarithmically up to max_distance.

    Args:
        d_model: Features of a vector.
        norm: Norm of the vectors.
        num_buckets: Number of buckets; even.
        max_distance: Distance from which all keys share a bucket.
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.

    Raises:
        ConfigError: If there are too few buckets, or max_distance is not above the distances with their own bucket.
    """

    weight: Array
    norm: Norm
    max_distance: int

    def __init__(self, d_model: int, norm: Norm, *, num_buckets: int = 512, max_distance: int = 512, init: Init = None):
        if num_buckets % 2 or not 0 < num_buckets // 4 < max_distance - 1:
            expected = f"an even number from 4, and a max_distance above {num_buckets // 4 + 1}"
            raise ConfigError(f"{_received(num_buckets, max_distance)}; expected {expected}")
        self.weight = initializer(init).normal((num_buckets, d_model), d_model**-0.5)
        self.norm, self.max_distance = norm, max_distance

    def __call__(self, length: int) -> Array:
        """Return the vectors of the distances 1 - length, ..., length - 1 from key to query, (distances, d_model)."""
        xp, rows = array_namespace(self.weight).library, _table_rows(length)
        table = _log_bucket_table, (rows, self.weight.shape[0], self.max_distance)
        window = slice(rows - length, rows + length - 1)
        buckets = xp.rows_of_table(table, window, None, device(self.weight))
        return self.norm(embedding(self.weight, buckets))


@_cached
def _log_bucket_table(rows: int, num_buckets: int, max_distance: int) -> Array:
    """Return the buckets of DeBERTa of the distances 1 - rows, ..., rows - 1."""
    distance: Any = np.arange(1 - rows, rows)
    half, exact = num_buckets // 2, num_buckets // 4
    growth = np.log(np.maximum(np.abs(distance), exact) / exact) / math.log((max_distance - 1) / exact)
    far = exact + np.ceil(growth * (exact - 1)).astype(np.int64)
    signed = np.where(np.abs(distance) <= exact, distance, np.sign(distance) * far)
    return np.clip(half + signed, 0, num_buckets - 1)


def _distances(xp: Namespace, queries: int, keys: int, device: Device) -> Array:
    """Return key position minus query position, (queries, keys)."""
    query = xp.reshape(xp.arange(keys - queries, keys, device=device), (queries, 1))
    return xp.reshape(xp.arange(keys, device=device), (1, keys)) - query


@_cached
def _bucket_table(rows: int, num_buckets: int, max_distance: int, bidirectional: bool) -> Array:
    """Return T5's buckets of the distances 1 - rows, ..., rows - 1."""
    distance: Any = np.arange(1 - rows, rows)
    first: Any = np.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        first = np.where(distance > 0, num_buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    exact = num_buckets // 2
    growth = np.log(np.maximum(distance, 1) / exact) / math.log(max_distance / exact)
    # The tiny addition undoes rounding where a distance is exactly the first of a bucket.
    far = exact + (growth * (num_buckets - exact) + 1e-9).astype(np.int64)
    return first + np.where(distance < exact, distance, np.minimum(far, num_buckets - 1))
