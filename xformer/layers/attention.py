"""Multi-head attention (Vaswani et al., 2017, section 3.2.2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from xformer import masks
from xformer.backends import Array, array_namespace, device, extra
from xformer.config import as_flag, check_count
from xformer.errors import ConfigError, ShapeError, check_arguments
from xformer.layers.cache import KVCache
from xformer.layers.dropout import Dropout
from xformer.layers.initializer import Init, initializer
from xformer.layers.linear import Linear, as_dtype_of
from xformer.layers.normalization import Norm
from xformer.layers.positions import Rotation
from xformer.ops import attention, attention_weights, project_heads
from xformer.ops.linear import Projection, merge_heads, split_heads
from xformer.random import Rng
from xformer.tracing.activations import OPEN_BLOCKS, is_observed, named
from xformer.tree import Module


class MultiHeadAttention(Module):
    """Attention with several heads, each on head_dim = d_model / num_heads features (Vaswani et al., 2017, 3.2.2).

    Args:
        d_model: Features of the input and output.
        num_heads: Heads of the query.
        num_key_value_heads: Heads of keys and values, each shared by a group of query heads (grouped-query attention,
            Ainslie et al., 2023; 1 is multi-query attention, Shazeer, 2019). Default: num_heads.
        head_dim: Features of a head; default d_model / num_heads, which num_heads must then divide.
        bias: Add learned biases to the projections of queries, keys and values.
        key_bias: Add a learned bias to the projection of keys; default as `bias`.
        output_bias: Add a learned bias to the output projection; default as `bias`.
        norm: (features, *, init) -> norm of each head's queries and keys, before rotation (Dehghani et al., 2023).
        norm_all_heads: Apply `norm` to the features of all heads together, (batch, length, heads * head_dim), instead
            (OLMo 2).
        scale: Scale of the scores; default 1 / sqrt(head_dim).
        softcap: Limit c of the scores, c tanh(score / c).
        dropout: Dropout rate on the attention weights.
        window: Distance that queries can see, in tokens (see `masks.sliding_window`); None: no limit.
        sinks: Add a learned logit per head to the denominator of the softmax (attention sinks, gpt-oss).
        init: Source of the initial parameters, required: an `Initializer`, or a seed for a new one on NumPy.

    Raises:
        ConfigError: If the numbers of heads do not divide d_model or each other, or the window is less than 1.

    Examples:
        >>> import numpy as np
        >>> attention = MultiHeadAttention(8, 2, init=0)
        >>> x, memory = np.ones((1, 5, 8), dtype=np.float32), np.ones((1, 7, 8), dtype=np.float32)
        >>> attention(x, causal=True).shape  # self-attention
        (1, 5, 8)
        >>> attention(x, memory, mask=masks.padding(np.asarray([[4, 5, 6, 2, 0, 0, 0]]), 0)).shape  # cross-attention
        (1, 5, 8)
    """

    __activations__ = ("queries", "keys", "values", "scores", "weights", "heads", "output")

    query: Linear
    key: Linear
    value: Linear
    output: Linear
    query_norm: Norm | None
    key_norm: Norm | None
    norm_all_heads: bool
    dropout: Dropout
    num_heads: int
    num_key_value_heads: int
    window: int | None
    scale: float | None
    softcap: float | None
    sinks: Array | None

    @check_arguments(batch_first="arrays are always (batch, length, features)")
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        key_bias: bool | None = None,
        output_bias: bool | None = None,
        norm: Callable[..., Norm] | None = None,
        norm_all_heads: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        window: int | None = None,
        sinks: bool = False,
        init: Init = None,
    ):
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        check_heads(d_model, num_heads, num_key_value_heads, head_dim)
        if window is not None and window < 1:
            raise ConfigError(f"window is {window}; expected at least 1 token, or None for no limit")
        init = initializer(init)
        head_dim = d_model // num_heads if head_dim is None else head_dim
        features, key_value_features = num_heads * head_dim, num_key_value_heads * head_dim
        self.query = Linear(d_model, features, bias=bias, init=init)
        self.key = Linear(d_model, key_value_features, bias=bias if key_bias is None else key_bias, init=init)
        self.value = Linear(d_model, key_value_features, bias=bias, init=init)
        self.output = Linear(features, d_model, bias=bias if output_bias is None else output_bias, init=init)
        self.norm_all_heads = as_flag("norm_all_heads", norm_all_heads)
        self.query_norm = None if norm is None else norm(features if norm_all_heads else head_dim, init=init)
        self.key_norm = None if norm is None else norm(key_value_features if norm_all_heads else head_dim, init=init)
        self.dropout = Dropout(dropout)
        self.num_heads = num_heads
        self.num_key_value_heads = num_key_value_heads
        self.window = window
        self.scale = scale
        self.softcap = softcap
        self.sinks = init.zeros((num_heads,)) if as_flag("sinks", sinks) else None

    @check_arguments(
        attn_mask="use mask, True = may attend; masks.from_blocked converts the masks of torch.nn.MultiheadAttention",
        key_padding_mask="use mask=masks.from_blocked(key_padding_mask)[:, None, None, :]",
        need_weights="use weights(query, key), or xformer.record(layer, 'weights')",
    )
    def __call__(
        self,
        query: Array,
        key: Array | None = None,
        value: Array | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
        causal: bool = False,
        distances: Array | None = None,
        rng: Rng | None = None,
        cache: KVCache | None = None,
    ) -> Array:
        """Attend from queries to keys. Inputs are cast to the dtype of the parameters.

        Args:
            query: Array of shape (batch, queries, d_model).
            key: Array of shape (batch, keys, d_model); default `query`, for self-attention.
            value: Array of shape (batch, keys, d_model); default `key`.
            mask: Boolean, True = may attend; broadcastable to (batch, heads, queries, keys).
            bias: Added to the scores; floating, broadcastable to (batch, heads, queries, keys).
            rotation: Rotary positions of queries and keys (see `Rotary`).
            causal: Attend to keys up to the position of the query only; the last query is aligned with the last key.
            distances: Embeddings of relative positions, (2 * length - 1, d_model), from `RelativeEmbedding`, for
                disentangled self-attention without a cache.
            rng: Draws dropout on the attention weights; None switches it off.
            cache: Keys and values of earlier tokens; those of this call are appended.

        Returns:
            Array of shape (batch, queries, d_model).

        Raises:
            ShapeError: If shapes do not match, or `value` is given without `key`.
        """
        q, k, v, mask = self._project(query, key, value, mask, rotation, cache)
        bias = None if bias is None else as_dtype_of(bias, q)
        if distances is not None:
            scores = self._distance_scores(q, k, distances)
            bias = scores if bias is None else bias + scores
        k, v, mask, bias = self._with_sinks(k, v, mask, bias)
        options: dict[str, Any] = {"causal": causal}
        if rng is not None:
            draw = self.dropout.draw((*q.shape[:-1], k.shape[-2]), q, rng)
            options["dropout_mask"], options["keep_probability"] = draw
        y = self.output(merge_heads(self._attend(q, k, v, mask, bias, **options)))
        return named(self, "output", y) if OPEN_BLOCKS else y

    def attend(self, query: Array, cache: KVCache, *, mask: Array | None = None) -> Array:
        """Attend to keys and values that were projected before, e.g. those of the memory during decoding.

        Args:
            query: Array of shape (rows, queries, d_model).
            cache: Projected keys and values. It may hold fewer rows than `query`: neighboring rows of `query`, such as
                the hypotheses of a sentence, then share a row of the cache.
            mask: Boolean, True = may attend; broadcastable to (cached rows, heads, queries, keys).

        Returns:
            Array of shape (rows, queries, d_model).

        Raises:
            ShapeError: If the cache is empty, or `query` does not have a multiple of its rows.
        """
        key = cache.key
        if key is None or cache.value is None:
            raise ShapeError("the cache is empty; expected the keys and values of keys_and_values(memory)")
        xp, sentences = array_namespace(query), key.shape[0]
        if len(query.shape) != 3 or query.shape[0] != query.shape[0] // max(1, sentences) * sentences:
            raise ShapeError(
                f"query has shape {tuple(query.shape)}; expected (rows, queries, d_model) with a multiple of the "
                f"{sentences} rows of the cache"
            )
        rows, queries, d_model = query.shape
        # To attention, the queries of neighboring rows are simply more queries of one sentence.
        grouped = xp.reshape(query, (sentences, rows // max(1, sentences) * queries, d_model))
        queries_in_heads = named(self, "queries", self._queries(grouped))
        merged = merge_heads(self._attend(queries_in_heads, *self._with_sinks(key, cache.value, mask, None)))
        return named(self, "output", self.output(xp.reshape(merged, (rows, queries, merged.shape[-1]))))

    def weights(
        self,
        query: Array,
        key: Array | None = None,
        *,
        mask: Array | None = None,
        bias: Array | None = None,
        rotation: Rotation | None = None,
        causal: bool = False,
    ) -> Array:
        """Return the attention weights of each head, for inspection: (batch, heads, queries, keys).

        Arguments are those of a call.
        """
        q, k, v, mask = self._project(query, key, None, mask, rotation)
        k, _, mask, bias = self._with_sinks(k, v, mask, None if bias is None else as_dtype_of(bias, q))
        weights = attention_weights(q, k, mask, bias, causal=causal, scale=self.scale, softcap=self.softcap)
        return weights if self.sinks is None else weights[..., 1:]

    def _attend(self, q: Array, k: Array, v: Array, mask: Array | None, bias: Array | None, **options: Any) -> Array:
        """Return the outputs of the heads, (batch, heads, queries, head_dim)."""
        options |= {"scale": self.scale, "softcap": self.softcap}
        if not OPEN_BLOCKS:
            return attention(q, k, v, mask, bias, **options)
        if is_observed(self, "scores", "weights"):
            options |= {"edit_scores": partial(self._named, "scores"), "edit_weights": partial(self._named, "weights")}
        return named(self, "heads", attention(q, k, v, mask, bias, **options))

    def _named(self, name: str, x: Array) -> Array:
        """Name the attention scores or weights, without those of the sinks."""
        if self.sinks is None:
            return named(self, name, x)
        return array_namespace(x).concat([x[..., :1], named(self, name, x[..., 1:])], axis=-1)

    def _with_sinks(
        self, k: Array, v: Array, mask: Array | None, bias: Array | None
    ) -> tuple[Array, Array, Array | None, Array | None]:
        """Add a first key and value of zeros, whose scores are the sinks, (heads,)."""
        if self.sinks is None:
            return k, v, mask, bias
        xp, (batch, heads, num_keys, head_dim) = array_namespace(k, self.sinks), k.shape
        options = {"dtype": k.dtype, "device": device(k)}
        k, v = (xp.concat([xp.zeros((batch, heads, 1, head_dim), **options), x], axis=2) for x in (k, v))
        scores = xp.zeros((1, self.num_heads, 1, num_keys), **options)
        scores = scores if bias is None else extra.cast_like(scores + bias, k)
        sinks = xp.broadcast_to(xp.reshape(self.sinks, (1, self.num_heads, 1, 1)), (*scores.shape[:3], 1))
        bias = xp.concat([extra.cast_like(sinks, k), scores], axis=3)
        if mask is not None:
            mask = xp.broadcast_to(mask, (*mask.shape[:-1], num_keys))
            mask = xp.concat([xp.ones((*mask.shape[:-1], 1), dtype=mask.dtype, device=device(mask)), mask], axis=-1)
        return k, v, mask, bias

    def keys_and_values(self, key: Array, value: Array | None = None) -> tuple[Array, Array]:
        """Project keys and values into heads.

        Args:
            key: Array of shape (batch, keys, d_model).
            value: Array of shape (batch, keys, d_model); default `key`.

        Returns:
            Keys and values, each (batch, num_key_value_heads, keys, head_dim).
        """
        keys, values = self._keys_and_values(key, value)
        return named(self, "keys", keys), named(self, "values", values)

    def _keys_and_values(self, key: Array, value: Array | None) -> tuple[Array, Array]:
        _, *projections = self._projections()
        if value is None or value is key:
            keys, values = project_heads(as_dtype_of(key, self.key.weight), *projections)
        else:
            inputs = (as_dtype_of(x, self.key.weight) for x in (key, value))
            (keys,), (values,) = (project_heads(x, p) for x, p in zip(inputs, projections, strict=True))
        return self._normalized(keys, self.key_norm), values

    def _distance_scores(self, q: Array, k: Array, distances: Array) -> Array:
        """Return the scores of queries and distances and of distances and keys (He et al., 2021, section 3.1)."""
        xp, head_dim, length = array_namespace(q), q.shape[3], q.shape[2]
        if k.shape[1:] != q.shape[1:] or distances.shape[0] != 2 * length - 1:
            raise ShapeError(
                f"distances has shape {tuple(distances.shape)}, queries and keys in heads {tuple(q.shape)} and "
                f"{tuple(k.shape)}; expected as many keys as queries, and (2 length - 1, d_model)"
            )
        rows = as_dtype_of(distances, self.query.weight)[None, :, :]
        query, (key,) = self._queries(rows), project_heads(rows, self._projections()[1])
        key = xp.flip(self._normalized(key, self.key_norm), axis=2)  # the distance falls with the position of the key
        to_distances = _by_position(xp.matmul(q, xp.matrix_transpose(key)))
        from_distances = xp.matrix_transpose(_by_position(xp.matmul(k, xp.matrix_transpose(query))))
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return extra.cast_like((to_distances + from_distances) * scale, q)

    def _projections(self) -> tuple[Projection, Projection, Projection]:
        key, value, heads = self.key, self.value, self.num_key_value_heads
        query = self.query.weight, self.query.bias, self.num_heads
        return query, (key.weight, key.bias, heads), (value.weight, value.bias, heads)

    def _queries(self, query: Array) -> Array:
        (queries,) = project_heads(as_dtype_of(query, self.query.weight), self._projections()[0])
        return self._normalized(queries, self.query_norm)

    def _normalized(self, x: Array, norm: Norm | None) -> Array:
        """Apply the norm of queries or keys, (batch, heads, length, head_dim)."""
        if norm is None or not self.norm_all_heads:
            return x if norm is None else norm(x)
        batch, heads, length, head_dim = x.shape
        rows = array_namespace(x).reshape(norm(merge_heads(x)), (batch * length, heads * head_dim))
        return split_heads(rows, (batch, length), heads)

    def _project(
        self,
        query: Array,
        key: Array | None,
        value: Array | None,
        mask: Array | None,
        rotation: Rotation | None,
        cache: KVCache | None = None,
    ) -> tuple[Array, Array, Array, Array | None]:
        """Return queries, keys and values in heads, and the mask combined with the window."""
        if key is None and value is not None:
            raise ShapeError("value is given without key; expected both, or neither for self-attention")
        if key is not None and (key is not query or (value is not None and value is not query)):
            q, (k, v) = self._queries(query), self._keys_and_values(key, value)
        else:
            q, k, v = project_heads(as_dtype_of(query, self.query.weight), *self._projections())
            q, k = self._normalized(q, self.query_norm), self._normalized(k, self.key_norm)
        if rotation is not None:
            rotation = Rotation(*(as_dtype_of(angle, q) for angle in rotation))
            q, k = rotation(q), rotation(k)
        if OPEN_BLOCKS:
            q, k, v = named(self, "queries", q), named(self, "keys", k), named(self, "values", v)
        if cache is not None:
            k, v = cache.append(k, v)
        if self.window is not None:
            start = None if cache is None or cache.index is None else cache.index[:, None, None, None]
            lengths, options = (q.shape[2], k.shape[2]), {"xp": array_namespace(q), "device": device(q)}
            mask = masks.combine(mask, masks.sliding_window(*lengths, size=self.window, start=start, **options))
        return q, k, v, mask


def _by_position(scores: Array) -> Array:
    """Return [i, j - i + length - 1] at [i, j], for scores (batch, heads, length, 2 length - 1): a square matrix."""
    xp, (batch, heads, length, count) = array_namespace(scores), scores.shape
    flat = xp.reshape(xp.concat([scores, scores[:, :, :, :1]], axis=3), (batch, heads, length * (count + 1)))
    rows = flat[:, :, length - 1 : length - 1 + length * count]  # each starts one column earlier than that before it
    return xp.reshape(rows, (batch, heads, length, count))[:, :, :, :length]


def check_heads(d_model: int, num_heads: int, num_key_value_heads: int, head_dim: int | None = None) -> None:
    """Raise ConfigError unless num_heads divides d_model (without a head_dim) and num_key_value_heads num_heads."""
    for name, value in (("d_model", d_model), ("num_heads", num_heads), ("num_key_value_heads", num_key_value_heads)):
        check_count(name, value)
    if head_dim is not None:
        check_count("head_dim", head_dim)
    if head_dim is None and d_model % num_heads:
        raise ConfigError(
            f"d_model {d_model} is not divisible by num_heads {num_heads}; "
            f"choose e.g. d_model {num_heads * max(1, round(d_model / num_heads))} or another num_heads"
        )
    if num_heads % num_key_value_heads:
        raise ConfigError(
            f"num_heads {num_heads} is not divisible by num_key_value_heads {num_key_value_heads}; "
            "expected groups of query heads of equal size"
        )
