"""Multi-head attention (Vaswani et al., 2017, section 3.2.2)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Never

from xformer import hints, masks, native
from xformer.backends import Array, array_namespace, device, dtype_name, extra
from xformer.backends.arrays import is_of_numpy
from xformer.config import check_bool, check_count, check_heads, with_parameters_of
from xformer.errors import ConfigError, ShapeError, check_arguments, unknown_argument
from xformer.layers.basic import Dropout, Init, Linear, Norm, as_dtype_of, initializer
from xformer.layers.cache import KVCache
from xformer.layers.positions import Rotation
from xformer.ops import project_heads
from xformer.ops.attention import Edit, attention, cached_attention, fuses_cache, visible
from xformer.ops.linear import merge_heads, split_heads
from xformer.random import Rng
from xformer.tracing.activations import OPEN_BLOCKS, call_on_host, is_observing, named, observers, record
from xformer.tree import Module, wrong_array

PROJECTIONS = ("query", "key", "value", "output")


class MultiHeadAttention(Module):
    r"""Attention with several heads, each on head_dim = d_model / num_heads features (Vaswani et al., 2017, 3.2.2).

        q_h = query W_q[h]        k_h = key W_k[h]        v_h = value W_v[h]
        head_h = softmax(q_h k_h^T / sqrt(head_dim) + bias, where the mask allows it) v_h
        output = concat(head_1, ..., head_H) W_o

    Why is there no train mode? Dropout is drawn from the `rng` of a call, so a call without one is deterministic.
    Why is the mask True where attention is allowed? Masks then combine with `&`, and no mask means everything.
    Where is flash attention? In `ops.attention`: the layer states the mathematics, which a kernel may compute.
    How do single families of models differ? They extend the layer; see the end of this file.

    Args:
        d_model: Features of the input and output.
        num_heads: Heads of the query.
        num_key_value_heads: Heads of keys and values, each shared by a group of query heads (grouped-query attention,
            Ainslie et al., 2023; 1 is multi-query attention, Shazeer, 2019). Default: num_heads.
        head_dim: Features of a head; default d_model / num_heads, which num_heads must then divide.
        bias: Add learned biases to the four projections; or the names of those that have one, such as ("query",
            "value", "output"): a bias of keys adds the same number to all scores of a query, which changes no weight.
        norm: (features, *, init) -> norm of each head's queries and keys, before rotation (Dehghani et al., 2023).
        scale: Scale of the scores; default 1 / sqrt(head_dim).
        dropout: Dropout rate on the attention weights.
        window: Distance that queries can see, in tokens (see `masks.sliding_window`); None: no limit.
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
    dropout: Dropout
    num_heads: int
    num_key_value_heads: int
    window: int | None
    scale: float | None

    @check_arguments(**hints.ATTENTION)
    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool | Sequence[str] = True,
        norm: Callable[..., Norm] | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        window: int | None = None,
        init: Init = None,
    ):
        num_key_value_heads = num_heads if num_key_value_heads is None else num_key_value_heads
        check_heads(d_model, num_heads, num_key_value_heads, head_dim)
        check_count("window", 1 if window is None else window)
        biases = bias if isinstance(bias, tuple | list) else PROJECTIONS if check_bool("bias", bias) else ()
        if not {*biases} <= {*PROJECTIONS}:
            raise ConfigError(f"bias is {bias!r}; expected True, False, or names out of {', '.join(PROJECTIONS)}")
        init = initializer(init)
        head_dim = d_model // num_heads if head_dim is None else head_dim
        features, key_value_features = num_heads * head_dim, num_key_value_heads * head_dim
        self.query = Linear(d_model, features, bias="query" in biases, init=init)
        self.key = Linear(d_model, key_value_features, bias="key" in biases, init=init)
        self.value = Linear(d_model, key_value_features, bias="value" in biases, init=init)
        self.output = Linear(features, d_model, bias="output" in biases, init=init)
        self.query_norm = None if norm is None else norm(head_dim, init=init)
        self.key_norm = None if norm is None else norm(head_dim, init=init)
        self.dropout = Dropout(dropout)
        self.num_heads, self.num_key_value_heads = num_heads, num_key_value_heads
        self.window, self.scale = window, scale

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
        rng: Rng | None = None,
        cache: KVCache | None = None,
        **unknown: Never,
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
            rng: Draws dropout on the attention weights; None switches it off.
            cache: Keys and values of earlier tokens; those of this call are appended.
            **unknown: None; the error for one has a hint.

        Returns:
            Array of shape (batch, queries, d_model).

        Raises:
            ShapeError: If shapes do not match, or `value` is given without `key`.
            ConfigError: If an argument is unknown.
        """
        if unknown:
            known = inspect.signature(type(self).__call__).parameters
            raise unknown_argument(type(self), unknown, known, hints.ATTENTION_CALL)
        if key is None and value is not None:
            raise ShapeError("value is given without key; expected both, or neither for self-attention")
        key = query if key is None else key
        q, k, v = self._project(query=query, key=key, value=key if value is None else value)
        q, k = _rotated(rotation, q, k)  # positions enter here, and do not touch the values
        if OPEN_BLOCKS:
            q, k, v = named(self, "queries", q), named(self, "keys", k), named(self, "values", v)
        new: tuple[Array, ...] = ()
        edits = observers(self, "scores", "weights")
        if cache is not None and rng is None and not edits and self._fuses(cache, q, k, v):
            new, k, v = (k, v), cache.key, cache.value  # type: ignore[assignment]
        elif cache is not None:  # decoding: earlier keys come first, so that the last query stays aligned with the last
            k, v = cache.append(k, v)
        options: dict[str, Any] = {"causal": causal}
        if self.window is not None and cache is not None:
            mask = self._within_window(self.window, mask, q, k, cache.index)
        elif self.window is not None:
            options["window"] = self.window
        bias = None if bias is None else self._score_bias(bias, q, k)
        if cache is not None and new:
            heads = cached_attention(q, *new, k, v, cache.index, mask, bias, scale=self._scale_of(q))
        else:
            index = None if cache is None else cache.index
            heads = self._heads(q, k, v, mask, bias, index, rng=rng, edits=edits, **options)
        y = self.output(merge_heads(named(self, "heads", heads)))
        return named(self, "output", y) if OPEN_BLOCKS else y

    def _fuses(self, cache: KVCache, q: Array, k: Array, v: Array) -> bool:
        """Return whether a kernel attends to a cache of fixed shape and appends to it."""
        is_plain = cache.index is not None and type(self)._attend is MultiHeadAttention._attend
        return is_plain and fuses_cache(q, k, v, cache.key, cache.value, cache.index, scale=self._scale_of(q))

    def _adds_keys_in_order(self, q: Array) -> bool:
        """Return whether a native kernel attends; other products round by the number of keys, also of masked ones."""
        is_plain = type(self)._attend is MultiHeadAttention._attend and native.is_available()
        return is_plain and dtype_name(q.dtype) == "float32"

    def _scale_of(self, q: Array) -> float:
        return 1.0 / math.sqrt(q.shape[-1]) if self.scale is None else self.scale

    def attend(self, query: Array, cache: KVCache, *, mask: Array | None = None) -> Array:
        """Attend to keys and values that were projected before, e.g. those of the memory during decoding.

        Args:
            query: Array of shape (rows, queries, d_model).
            cache: Projected keys and values. It may hold fewer rows than `query`: neighboring rows of `query`, such as
                the hypotheses of an input, then share a row of the cache.
            mask: Boolean, True = may attend; broadcastable to (cached rows, heads, queries, keys).

        Returns:
            Array of shape (rows, queries, d_model).

        Raises:
            ShapeError: If the cache is empty, or `query` does not have a multiple of its rows.
        """
        key = cache.key
        if key is None or cache.value is None:
            raise ShapeError("the cache is empty; expected the keys and values of keys_and_values(memory)")
        xp, inputs = array_namespace(query), key.shape[0]
        if len(query.shape) != 3 or query.shape[0] != query.shape[0] // max(1, inputs) * inputs:
            expected = f"(rows, queries, d_model) with a multiple of the {inputs} rows of the cache"
            raise wrong_array(query, "query has", expected)
        rows, queries, d_model = query.shape
        # To attention, the queries of neighboring rows are simply more queries of one input.
        grouped = xp.reshape(query, (inputs, rows // max(1, inputs) * queries, d_model))
        (q,) = self._project(query=grouped)
        q, edits = named(self, "queries", q), observers(self, "scores", "weights")
        merged = merge_heads(named(self, "heads", self._heads(q, key, cache.value, mask, None, None, edits=edits)))
        return named(self, "output", self.output(xp.reshape(merged, (rows, queries, merged.shape[-1]))))

    @with_parameters_of(__call__)
    def weights(self, *inputs: Array, **options: Any) -> Array:
        """Return the attention weights of each head, for inspection: (batch, heads, queries, keys).

        Arguments are those of a call.
        """
        with record(self, "weights") as activations:
            self(*inputs, **options)
        weights: Array = activations["weights"]
        return weights

    def keys_and_values(self, key: Array, value: Array | None = None) -> tuple[Array, Array]:
        """Project keys and values into heads.

        Args:
            key: Array of shape (batch, keys, d_model).
            value: Array of shape (batch, keys, d_model); default `key`.

        Returns:
            Keys and values, each (batch, num_key_value_heads, keys, head_dim).
        """
        keys, values = self._project(key=key, value=key if value is None else value)
        return named(self, "keys", keys), named(self, "values", values)

    def _project(self, **inputs: Array) -> list[Array]:
        """Return the projections of inputs (batch, length, d_model) by name, (batch, heads, length, head_dim) each."""
        name, x = next(iter(inputs.items()))
        for other in inputs.values():
            if other is not x:  # different arrays: one after the other
                del inputs[name]
                return [*self._project(**{name: x}), *self._project(**inputs)]
        maps = []
        for name in inputs:
            heads = self.num_heads if name == "query" else self.num_key_value_heads
            maps.append((getattr(self, name).weight, getattr(self, name).bias, heads))
        projected = [*project_heads(as_dtype_of(x, self.query.weight), *maps)]  # one operation, which reads x once
        if self.query_norm is not None:
            for i, name in enumerate(inputs):
                if name != "value":
                    projected[i] = self._normalized(projected[i], getattr(self, f"{name}_norm"))
        return projected

    def _score_bias(self, bias: Array, q: Array, k: Array) -> Array:
        """Return the argument `bias` as what is added to the scores."""
        return as_dtype_of(bias, q)

    def _normalized(self, x: Array, norm: Norm) -> Array:
        """Apply the norm of queries or keys, (batch, heads, length, head_dim)."""
        return norm(x)

    def _within_window(self, size: int, mask: Array | None, q: Array, k: Array, index: Any) -> Array | None:
        """Return a mask that is also False for keys beyond a window; `index` is that of the cache."""
        start = None if index is None else index[:, None, None, None]
        lengths, options = (q.shape[2], k.shape[2]), {"xp": array_namespace(q), "device": device(q)}
        return masks.combine(mask, masks.sliding_window(*lengths, size=size, start=start, **options))

    def _heads(self, *arrays: Any, rng: Rng | None = None, edits: dict[str, Edit], **options: Any) -> Array:
        """Return the result of `_attend`; blocks see the same bits with a cache that grows and one of fixed shape.

        The last array is the index of the cache, or None.
        """
        *inputs, index = arrays
        options["edits"] = edits
        is_cut = edits or (index is not None and is_observing() and not self._adds_keys_in_order(inputs[0]))
        if rng is not None or not is_cut:
            return self._attend(*inputs, rng=rng, **options)
        return call_on_host(partial(_attend_to_tokens, **options), self, *arrays)

    def _attend(
        self, q: Array, k: Array, v: Array, *masks: Any, rng: Rng | None, edits: dict[str, Edit], **options: Any
    ) -> Array:
        """Return the values (batch, heads, queries, head_dim) that each query finds, weighted by the softmax.

        The masks are the mask and the bias.
        """
        options["scale"] = self.scale
        if rng is not None:
            draw = self.dropout.draw((*q.shape[:-1], k.shape[-2]), q, rng)
            options["dropout_mask"], options["keep_probability"] = draw
        options |= {f"edit_{name}": edit for name, edit in edits.items()}
        return attention(q, k, v, *masks, **options)


def _rotated(rotation: Rotation | None, q: Array, k: Array) -> tuple[Array, Array]:
    """Return queries and keys (batch, heads, length, head_dim) rotated by their positions, if these rotate them."""
    if rotation is None:
        return q, k
    rotation = Rotation(*(as_dtype_of(angle, q) for angle in rotation))
    return rotation(q), rotation(k)


def _attend_to_tokens(layer: Any, q: Array, k: Array, v: Array, *rest: Any, **options: Any) -> Array:
    """Return the result of `_attend`, of a cache of fixed shape on NumPy without the slots after the longest row."""
    *masks, index = rest
    if index is not None and is_of_numpy(index):
        size = int(index.max()) + q.shape[2]
        k, v = k[:, :, :size], v[:, :, :size]
        masks = [x if x is None or x.shape[-1] == 1 else x[..., :size] for x in masks]
    return layer._attend(q, k, v, *masks, rng=None, **options)


# --- Attention of single families of models ---------------------------------------------------------------------------
#
# Limits of the scores, sinks, norms of all heads, and vectors of distances.


class FamilyAttention(MultiHeadAttention):
    """Multi-head attention with what single families of models add to it.

    Args:
        d_model: Features of the input and output.
        num_heads: Heads of the query.
        norm: As for `MultiHeadAttention`.
        norm_all_heads: Apply `norm` to the features of all heads together, (batch, length, heads * head_dim), instead
            (OLMo 2).
        softcap: Limit c of the scores, c tanh(score / c) (Gemma 2).
        sinks: Add a learned logit per head to the denominator of the softmax (attention sinks, gpt-oss).
        init: As for `MultiHeadAttention`.
        **options: Further arguments of `MultiHeadAttention`.
    """

    norm_all_heads: bool
    softcap: float | None
    sinks: Array | None

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        norm: Callable[..., Norm] | None = None,
        norm_all_heads: bool = False,
        softcap: float | None = None,
        sinks: bool = False,
        init: Init = None,
        **options: Any,
    ):
        init, self.norm_all_heads = initializer(init), check_bool("norm_all_heads", norm_all_heads)
        super().__init__(d_model, num_heads, norm=None if norm_all_heads else norm, init=init, **options)
        if norm is not None and norm_all_heads:
            self.query_norm, self.key_norm = (norm(x.weight.shape[1], init=init) for x in (self.query, self.key))
        self.softcap = softcap
        self.sinks = init.zeros((num_heads,)) if check_bool("sinks", sinks) else None

    def _normalized(self, x: Array, norm: Norm) -> Array:
        if not self.norm_all_heads:
            return norm(x)
        batch, heads, length, head_dim = x.shape
        rows = array_namespace(x).reshape(norm(merge_heads(x)), (batch * length, heads * head_dim))
        return split_heads(rows, (batch, length), heads)

    def _attend(self, q: Array, k: Array, v: Array, *masks: Any, edits: dict[str, Edit], **options: Any) -> Array:
        if self.sinks is not None:
            mask, bias = masks
            edits = {name: partial(_without_sinks, edit) for name, edit in edits.items()}
            if window := options.pop("window", 0):  # within which the sinks are not
                mask = visible(q, k, mask, False, window)
            k, v, *masks = self._with_sinks(k, v, mask, bias)  # type: ignore[assignment]
        return super()._attend(q, k, v, *masks, edits=edits, softcap=self.softcap, **options)

    def _with_sinks(
        self, k: Array, v: Array, mask: Array | None, bias: Array | None
    ) -> tuple[Array, Array, Array | None, Array]:
        """Add a first key and value of zeros, whose scores are the sinks: kernels need not know about them."""
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


def _without_sinks(edit: Edit, x: Array) -> Array:
    """Edit scores or weights after those of the sinks."""
    return array_namespace(x).concat([x[..., :1], edit(x[..., 1:])], axis=-1)


class DisentangledAttention(FamilyAttention, init=False):
    """Self-attention whose scores also depend on vectors of distances (He et al., 2021, section 3.1; DeBERTa).

    Arguments are those of `FamilyAttention`.
    """

    def __call__(self, x: Array, *, distances: Array, **options: Any) -> Array:  # type: ignore[override]
        """Attend from each token to all.

        Args:
            x: Array of shape (batch, length, d_model).
            distances: Vectors of relative positions, (2 * length - 1, d_model), from `RelativeEmbedding`.
            **options: `mask`, `causal` and `rng`, as for `MultiHeadAttention`.

        Returns:
            Array of the shape of x.
        """
        return super().__call__(x, bias=distances, **options)

    def _score_bias(self, distances: Array, q: Array, k: Array) -> Array:
        """Return the scores of queries and distances and of distances and keys."""
        xp, head_dim, length = array_namespace(q), q.shape[3], q.shape[2]
        if k.shape[1:] != q.shape[1:] or distances.shape[0] != 2 * length - 1:
            raise ShapeError(
                f"distances has shape {tuple(distances.shape)}, queries and keys in heads {tuple(q.shape)} and "
                f"{tuple(k.shape)}; expected as many keys as queries, and (2 length - 1, d_model)"
            )
        rows = as_dtype_of(distances, self.query.weight)[None, :, :]
        (query,), (key,) = self._project(query=rows), self._project(key=rows)
        key = xp.flip(key, axis=2)  # the distance falls with the position of the key
        to_distances = _by_position(xp.matmul(q, xp.matrix_transpose(key)))
        from_distances = xp.matrix_transpose(_by_position(xp.matmul(k, xp.matrix_transpose(query))))
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return extra.cast_like((to_distances + from_distances) * scale, q)


def _by_position(scores: Array) -> Array:
    """Return [i, j - i + length - 1] at [i, j], for scores (batch, heads, length, 2 length - 1): a square matrix."""
    xp, (batch, heads, length, count) = array_namespace(scores), scores.shape
    flat = xp.reshape(xp.concat([scores, scores[:, :, :, :1]], axis=3), (batch, heads, length * (count + 1)))
    rows = flat[:, :, length - 1 : length - 1 + length * count]  # each starts one column earlier than that before it
    return xp.reshape(rows, (batch, heads, length, count))[:, :, :, :length]
