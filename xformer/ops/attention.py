"""Scaled dot-product attention (Vaswani et al., 2017, section 3.2.1)."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xformer.backends import Array, accumulation_dtype, array_namespace, device, extra, is_half_precision
from xformer.backends.array_types import Device, Namespace
from xformer.config import check_bool, check_count, check_number
from xformer.errors import ShapeError
from xformer.ops.activations import apply_dropout
from xformer.ops.operation import FINITE, Operation
from xformer.ops.softmax import softmax, softmax_cotangent

Forward = Callable[..., tuple[Any, Any]]
Vjp = Callable[..., tuple[Any, ...]]
Edit = Callable[[Array], Array]
_SCALAR: tuple[int, ...] = ()  # the shape of a number


_shared = threading.local()  # .masks: what kernels made of masks, by what it was made of


@contextlib.contextmanager
def sharing_masks() -> Iterator[None]:
    """Let the layers of a block share what kernels make of masks and biases, which nothing writes to there."""
    outer, _shared.masks = getattr(_shared, "masks", None), {}
    try:
        yield
    finally:
        _shared.masks = outer


def shared(make: Callable[[], Any], arrays: Sequence[Any], *key: Any) -> Any:
    """Return make(), or in a block of `sharing_masks` what it returned for the same arrays and key."""
    masks = getattr(_shared, "masks", None)
    if masks is None:
        return make()
    key = *map(id, arrays), *key
    if key not in masks:
        masks[key] = make(), arrays  # which keep their ids
    return masks[key][0]


def causal_mask(xp: Namespace, queries: int, keys: int, device: Device = None) -> Array:
    """Return a mask (queries, keys), True where a key is not later than the query; the last query sees all keys."""
    query = xp.reshape(xp.arange(keys - queries, keys, device=device), (queries, 1))
    key = xp.reshape(xp.arange(keys, device=device), (1, keys))
    return key <= query


def window_mask(xp: Namespace, first: Any, queries: int, keys: int, window: int, device: Device = None) -> Array:
    """Return a mask (queries, keys), True where a key is less than `window` away; the first query is at `first`."""
    query = xp.reshape(xp.arange(queries, device=device), (queries, 1))
    return xp.abs(query + first - xp.reshape(xp.arange(keys, device=device), (1, keys))) < window


def visible(query: Array, key: Array, mask: Array | None, causal: bool, window: int) -> Array | None:
    """Return a mask that is also False where a causal mask or a window is; no window if it is 0."""
    xp, sizes = array_namespace(query), (query.shape[-2], key.shape[-2])
    if causal and sizes[0] > 1:  # a single query is the last one, and sees every key
        allowed = causal_mask(xp, *sizes, device(query))
        mask = allowed if mask is None else xp.logical_and(mask, allowed)
    if window:
        allowed = window_mask(xp, sizes[1] - sizes[0], *sizes, window, device(query))
        mask = allowed if mask is None else xp.logical_and(mask, allowed)
    return mask


def attention_weights(
    query: Array,
    key: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    edit_scores: Edit | None = None,
) -> Array:
    """Compute the weights of attention, softmax(scale Q K^T + bias).

    Arguments and errors are those of `attention`.

    Returns:
        Array of shape (batch, heads, queries, keys); fully masked rows are zero.
    """
    array_namespace(query, key, mask, bias)  # raises for arrays of several libraries
    four_axes = _with_four_axes(query, key, key)
    _operation.check(*four_axes, mask, bias, None)
    scale = 1.0 / math.sqrt(query.shape[-1] or 1) if scale is None else scale
    _operation.check_options({"scale": scale})
    weights = _weights(*four_axes[:2], mask, bias, check_bool("causal", causal), scale, softcap, edit_scores)
    if len(query.shape) == 4:
        return weights
    return array_namespace(weights).reshape(weights, (*query.shape[:-1], key.shape[-2]))


def _weights(q: Array, k: Array, mask: Any, bias: Any, causal: bool, scale: float, softcap: Any, edit: Any) -> Array:
    scores = _scores(q, k, bias, scale, softcap)
    scores = scores if edit is None else edit(scores)
    return extra.cast_like(softmax(scores, visible(q, k, mask, causal, 0)), q)


def _product(a: Array, b: Array, scale: float | None = None, *, wide: bool = False) -> Array:
    return array_namespace(a, b).matmul(a if scale is None else a * scale, b)


def _scores(query: Array, key: Array, bias: Any, scale: float, softcap: Any = None, product: Any = _product) -> Any:
    xp = array_namespace(query, key, bias)
    scores = product(query, xp.matrix_transpose(repeat_kv(key, query)), scale, wide=True)
    if softcap is not None:
        check_number("softcap", softcap, above=0)
        scores = xp.tanh(scores * (1.0 / softcap)) * softcap
    return scores if bias is None else scores + bias


def attention_functions(product: Callable[..., Any]) -> tuple[Forward, Vjp]:
    """Return the forward and the vjp of attention, also of grouped heads, given products of stacks of matrices.

    Args:
        product: (a, b, scale=None, wide=False) -> a @ b, times the scale if there is one. If `wide`, products of 16
            bits may be float32.
    """

    def forward(
        *arrays: Any, causal: bool, scale: float, keep_probability: float, save: bool, window: int = 0
    ) -> tuple[Any, Any]:
        query, key, value, mask, bias, dropout_mask = arrays
        scores = _scores(query, key, bias, scale, product=product)
        weights = softmax(scores, visible(query, key, mask, causal, window))
        weights = extra.cast_like(weights, query) if is_half_precision(query.dtype) else weights
        dropped = weights if dropout_mask is None else apply_dropout(weights, dropout_mask, keep_probability)
        return product(dropped, value), (query, key, value, weights, dropout_mask)

    def vjp(
        g: Array, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float, window: int = 0
    ) -> tuple[Any, ...]:
        """With P the weights, S the scores: dV = P^T g, dP = g V^T, dS = P (dP - sum(dP P)), dQ = dS K, dK = dS^T Q."""
        query, key, value, weights, dropout_mask = residuals
        xp = array_namespace(g, query, key, value)
        dquery = dkey = dvalue = dbias = None
        if needs[2]:
            dropped = weights if dropout_mask is None else apply_dropout(weights, dropout_mask, keep_probability)
            dvalue = product(xp.matrix_transpose(dropped), g)
        if needs[0] or needs[1] or needs[4]:
            dweights = product(g, xp.matrix_transpose(value), wide=True)
            if dropout_mask is not None:
                dweights = apply_dropout(dweights, dropout_mask, keep_probability)
            dbias = softmax_cotangent(dweights, extra.cast_like(weights, dweights))  # added to the scaled scores
            dscores = extra.cast_like(dbias, weights)
            dquery = product(dscores, key, scale) if needs[0] else None
            dkey = product(xp.matrix_transpose(dscores), query, scale) if needs[1] else None
        return dquery, dkey, dvalue, None, dbias if needs[4] else None, None

    return with_repeated_heads(forward, vjp)


def with_repeated_heads(forward: Forward, vjp: Vjp) -> tuple[Forward, Vjp]:
    """Return a forward and its vjp that take grouped heads, by repeating the heads of keys and values."""

    @functools.wraps(forward)  # with the names of its options
    def grouped_forward(
        query: Array, key: Array, value: Array, *masks: Array | None, **options: Any
    ) -> tuple[Any, Any]:
        heads = 0 if key.shape[1] == query.shape[1] else key.shape[1]
        if heads:
            key, value = repeat_kv(key, query), repeat_kv(value, query)
        output, residuals = forward(query, key, value, *masks, **options)
        return output, (residuals, heads)

    def grouped_vjp(g: Array, residuals: Any, needs: Any, **options: Any) -> tuple[Any, ...]:
        repeated, heads = residuals
        cotangents = vjp(g, repeated, needs, **options)
        if not heads:
            return cotangents
        dquery, dkey, dvalue, *rest = cotangents
        dkey, dvalue = (None if x is None else sum_kv_groups(x, heads) for x in (dkey, dvalue))
        return dquery, dkey, dvalue, *rest

    return grouped_forward, grouped_vjp


_forward, _vjp = attention_functions(_product)
_operation = Operation(
    "attention",
    "query: (batch, heads, queries, head_dim) float, key: (batch, kv_heads, keys, head_dim) float, "
    "value: (batch, kv_heads, keys, value_dim) float, mask?: ~(batch, heads, queries, keys) bool, "
    "bias?: ~(batch, heads, queries, keys) float, dropout_mask?: ~(batch, heads, queries, keys) bool "
    "-> (batch, heads, queries, value_dim)",
    _forward,
    _vjp,
    compute_in_float32=True,
    conditions={
        "heads to be a multiple of kv_heads": lambda sizes: (
            sizes["heads"] == sizes["kv_heads"] or (sizes["kv_heads"] > 0 and sizes["heads"] % sizes["kv_heads"] == 0)
        )
    },
    ranges={"scale": FINITE},
)


def _cached_forward(*arrays: Any, scale: float, save: bool) -> tuple[Array, Any]:
    query, key, value, keys, values, starts, mask, bias = arrays
    slots = cache_slots(starts, keys, key.shape[2])
    for old, new in ((keys, key), (values, value)):
        write_slots(old, new, slots)
    options = {"causal": False, "scale": scale, "keep_probability": 1.0, "save": save}
    return _forward(query, keys, values, mask, bias, None, **options)


cached_attention = Operation(
    "cached_attention",
    "query: (rows, heads, tokens, head_dim) float, key: (rows, kv_heads, tokens, head_dim) float, "
    "value: (rows, kv_heads, tokens, head_dim) float, keys: (rows, kv_heads, capacity, head_dim) float, "
    "values: (rows, kv_heads, capacity, head_dim) float, starts: (rows) int, mask?: ~(rows, heads, tokens, capacity) "
    "bool, bias?: ~(rows, heads, tokens, capacity) float -> (rows, heads, tokens, head_dim)",
    _cached_forward,
    None,
)
"""Write the keys and values of new tokens of each row into a cache, in place, from a position on, and attend to it."""


def fuses_cache(*arrays: Any, scale: float) -> bool:
    """Return whether a kernel computes `cached_attention` of these arrays, and of a mask and a bias."""
    xp: Any = array_namespace(*arrays)
    if xp.is_trace or not (xp.kernels.get(cached_attention.name) or cached_attention.enable_kernels(xp.library)):
        return False
    arrays = *arrays, None, None
    dtype = cached_attention.check(*arrays)
    return bool(cached_attention.select(xp, arrays, {"scale": scale}, dtype, save=False).backend)


def cache_slots(starts: Array, keys: Array, num_tokens: int) -> Array:
    """Return where new tokens go among all vectors of a cache, (rows * kv_heads * num_tokens,).

    Args:
        starts: Position of the first new token of each row, integers (rows,).
        keys: Keys of the cache, (rows, kv_heads, capacity, head_dim).
        num_tokens: Number of new tokens of each row.
    """
    xp, (rows, heads, capacity, _) = array_namespace(starts), keys.shape
    options = {"dtype": starts.dtype, "device": device(starts)}
    first = xp.reshape(xp.arange(rows * heads, **options) * capacity, (rows, heads, 1))
    places = starts[:, None] if num_tokens == 1 else starts[:, None] + xp.arange(num_tokens, **options)
    slots = first + xp.clip(places, max=capacity - 1)[:, None, :]  # rows that are not used may be at any position
    return xp.reshape(slots, (rows * heads * num_tokens,))


def write_slots(old: Any, new: Array, slots: Array) -> None:
    """Write new tokens (rows, kv_heads, tokens, features) into a cache in place."""
    xp, features = array_namespace(old, new), old.shape[3]
    xp.reshape(old, (-1, features))[slots, :] = xp.reshape(new, (-1, features))


def attention(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None = None,
    bias: Array | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_mask: Array | None = None,
    keep_probability: float = 1.0,
    edit_scores: Edit | None = None,
    edit_weights: Edit | None = None,
) -> Array:
    """Compute scaled dot-product attention, softmax(scale Q K^T + bias) V.

    Key and value may have fewer heads than the query, each shared by neighboring heads of the query: grouped-query
    attention (Ainslie et al., 2023) or, with one head, multi-query attention (Shazeer, 2019).

    Args:
        query: Array of shape (batch, heads, queries, head_dim).
        key: Array of shape (batch, key_value_heads, keys, head_dim).
        value: Array of shape (batch, key_value_heads, keys, value_dim).
        mask: Boolean, True = may attend, broadcastable to (batch, heads, queries, keys). A fully masked row gives
            zeros, and zero gradients. Masked values must still be finite: some kernels multiply them by zero, so NaN
            or infinity gives NaN.
        bias: Added to the scaled scores, broadcastable to (batch, heads, queries, keys), of the dtype of the query.
        causal: Whether to also mask keys later than the query; the last query sees the last key.
        window: Number of keys that a query sees in each direction, its own included (see `masks.sliding_window`), or
            None.
        scale: Scale of the scores, by default 1 / sqrt(head_dim).
        softcap: Limit c of the scaled scores, which become c tanh(score / c) (Gemma 2).
        dropout_mask: Dropout mask of the weights, (batch, heads, queries, keys), True = keep.
        keep_probability: Probability with which the dropout mask was drawn.
        edit_scores: Function of the scores (batch, heads, queries, keys) before masks and softmax, which returns those
            to use, e.g. to look at them; no kernel implements it.
        edit_weights: The same for the weights, before dropout.

    Returns:
        Array of shape (batch, heads, queries, value_dim).

    Raises:
        ShapeError: If the shapes do not match, or the mask is not boolean.
        BackendError: If the arrays are on different devices.
    """
    array_namespace(query, key, value, mask, bias, dropout_mask)  # raises for arrays of several libraries
    q, k, v = query, key, value
    shape, keys, values = getattr(q, "shape", _SCALAR), getattr(k, "shape", _SCALAR), getattr(v, "shape", _SCALAR)
    if not len(shape) == len(keys) == len(values) == 4 or shape[0] != keys[0] or shape[1] < keys[1]:
        q, k, v = _with_four_axes(q, k, v)
    scale = 1.0 / math.sqrt(query.shape[-1] or 1) if scale is None else scale
    if keep_probability != 1.0:
        check_number("keep_probability", keep_probability, above=0, at_most=1)
    if type(causal) is not bool:
        causal = check_bool("causal", causal)
    is_edited = edit_scores is not None or edit_weights is not None
    if softcap is not None or is_edited or window is not None:
        _operation.check(q, k, v, mask, bias, dropout_mask)
    if window is not None:
        check_count("window", window)
        if softcap is not None or is_edited or q.shape[2] == 1 or not array_namespace(q).library.has_windows:
            mask, window = visible(q, k, mask, False, window), None
    if is_edited:
        _operation.check_options({"scale": scale})
        weights = _weights(q, k, mask, bias, causal, scale, softcap, edit_scores)
        weights = weights if edit_weights is None else edit_weights(weights)
        dropped = weights if dropout_mask is None else apply_dropout(weights, dropout_mask, keep_probability)
        y = array_namespace(dropped, value).matmul(dropped, repeat_kv(v, q))
    else:
        if softcap is not None:  # the scores are a bias of queries and keys of one zero
            _operation.check_options({"scale": scale})
            bias = _scores(q, k, bias, scale, softcap)
            q, k = (array_namespace(x).zeros_like(x[..., :1]) for x in (q, k))
        options: dict[str, Any] = {"causal": causal, "scale": scale, "keep_probability": keep_probability}
        if window is not None:
            options["window"] = window
        heads, kv_heads = q.shape[1], k.shape[1]
        is_grouped = q.shape[2] == 1 and heads > kv_heads > 0 and heads % kv_heads == 0 and dropout_mask is None
        if is_grouped and not _depends_on_head(mask) and not _depends_on_head(bias):
            # Query heads that share keys can be queries of one head; without a mask, a single query sees every key.
            options["causal"] = False
            y = _regroup(_operation(_regroup(q, kv_heads), k, v, mask, bias, None, **options), heads)
        else:
            y = _operation(q, k, v, mask, bias, dropout_mask, **options)
    return y if len(query.shape) == 4 else array_namespace(y).reshape(y, (*query.shape[:-1], value.shape[-1]))


def _with_four_axes(query: Array, key: Array, value: Array) -> tuple[Array, Array, Array]:
    """Return arrays of two or three axes with leading axes of size 1, and broadcast a batch of size 1.

    Raises:
        ShapeError: If the numbers of axes differ, or are not 2, 3 or 4.
    """
    arrays = query, key, value
    axes = {len(getattr(array, "shape", ())) for array in arrays}
    if len(axes) > 1 or not axes <= {2, 3, 4}:
        shapes = ", ".join(str(tuple(getattr(array, "shape", ()))) for array in arrays)
        raise ShapeError(
            f"attention got query, key and value of shapes {shapes}; expected (batch, heads, queries, head_dim), "
            "(batch, kv_heads, keys, head_dim) and (batch, kv_heads, keys, value_dim), with 2, 3 or 4 axes each"
        )
    if axes != {4}:
        leading = (1,) * (4 - axes.pop())
        query, key, value = (array_namespace(x).reshape(x, (*leading, *x.shape)) for x in arrays)
    (batch, heads), (key_batch, kv_heads) = query.shape[:2], key.shape[:2]
    if (batch != key_batch and 1 in (batch, key_batch)) or heads == 1 < kv_heads:
        batch, heads = key_batch if batch == 1 else batch, kv_heads if heads == 1 else heads
        query = array_namespace(query).broadcast_to(query, (batch, heads, *query.shape[2:]))
        key = array_namespace(key).broadcast_to(key, (batch, *key.shape[1:]))
        value = array_namespace(value).broadcast_to(value, (batch, *value.shape[1:])) if value.shape[0] == 1 else value
    return query, key, value


def _depends_on_head(x: Array | None) -> bool:
    shape: tuple[int, ...] = getattr(x, "shape", ())  # the signature refuses what is not an array
    return len(shape) > 2 and shape[-3] > 1


def _regroup(x: Array, heads: int) -> Array:
    """Reshape (batch, old_heads, queries, features) to another number of heads, and more or fewer queries."""
    batch, old_heads, queries, features = x.shape
    return array_namespace(x).reshape(x, (batch, heads, old_heads * queries // heads, features))


def repeat_kv(x: Array, query: Array) -> Array:
    """Repeat heads of keys or values, (batch, key_value_heads, length, features), that heads of the query share."""
    if query.shape[1] == x.shape[1]:
        return x
    (batch, heads, length, features), group = x.shape, query.shape[1] // x.shape[1]
    xp = array_namespace(x)
    repeated = xp.broadcast_to(xp.expand_dims(x, axis=2), (batch, heads, group, length, features))
    return xp.reshape(repeated, (batch, heads * group, length, features))


def sum_kv_groups(x: Array, heads: int) -> Array:
    """Sum the cotangents (batch, query_heads, length, features) of repeated heads, the VJP of `repeat_kv`."""
    if x.shape[1] == heads:
        return x
    batch, repeated, length, features = x.shape
    xp = array_namespace(x)
    groups = xp.reshape(x, (batch, heads, repeated // heads, length, features))
    return xp.astype(xp.sum(groups, axis=2, dtype=accumulation_dtype(xp, x.dtype)), x.dtype, copy=False)
