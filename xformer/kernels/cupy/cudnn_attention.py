"""Fused attention on CuPy, by cuDNN: scores never reach the memory, forward or backward.

float16 and bfloat16; for float32, cuDNN has no backward. What it cannot do, or is known to do wrongly, `supports` says;
a plan that cannot be built sends its shape to `cupy_attention`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from xformer.backends import Array, array_namespace, device, dtype_name
from xformer.kernels.cupy import attention as cupy_attention
from xformer.kernels.cupy import cublas as cupy_products
from xformer.kernels.cupy import cudnn_plans as cupy_cudnn_plans
from xformer.kernels.cupy.cudnn_graph import DTYPES, Layout, Spec, in_rows, packed
from xformer.kernels.registry import Kernel, register
from xformer.ops.attention import causal_mask

_ALIGNMENT = 16  # bytes, of addresses and strides: cuDNN reads wrongly otherwise (cudnn-frontend issue 1571)
_BYTES = 2  # of a float16 or a bfloat16
_MOST_FEATURES = 256
# What a forbidden key's score gets: finite, because minus infinity in a whole row would make NaN, and a float16.
_FORBIDDEN = -65504.0
_TILE = 128  # keys and queries that cuDNN's derivative works on at a time
_LEAST_SCORES = 64 * 64  # queries times keys: of fewer, products are as fast, and short sentences have many shapes


def supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    """None for what cuDNN serves, else the reason why not."""
    query, key, value, mask, bias, keep = arrays
    reason = cupy_attention.mixed(arrays, tuple(DTYPES)) or _unfit(query, key, value)
    if reason is not None:
        return reason
    queries, keys = query.shape[2], key.shape[2]
    if keep is not None and tuple(keep.shape) != (*query.shape[:3], keys):
        return "the mask of dropout is broadcast"
    if queries == 1:
        return "one query: keys grow at every step of decoding, and each length would be a plan to build"
    if queries * keys < _LEAST_SCORES:
        return f"{queries} queries and {keys} keys: a plan of its own would not pay"
    if static["causal"] and queries > keys:
        return "causal, with fewer keys than queries"
    if static["causal"] and queries < keys and any(x is not None for x in (mask, bias, keep)):
        return "causal, with more keys than queries and a mask, a bias or dropout"
    return cupy_cudnn_plans.refusal(*_specs_of(arrays, static["causal"], static["scale"]))


def _unfit(query: Array, key: Array, value: Array) -> str | None:
    shapes = [tuple(array.shape) for array in (query, key, value)]
    if {len(shape) for shape in shapes} != {4}:
        return "not (batch, heads, length, features)"
    (batch, heads), (of_keys, heads_of_keys) = shapes[0][:2], shapes[1][:2]
    if batch != of_keys or heads % max(1, heads_of_keys) or shapes[1][:3] != shapes[2][:3]:
        return "batch or heads are broadcast"
    if 0 in (*shapes[0], *shapes[1], *shapes[2]):
        return "nothing to attend to"
    features = shapes[0][3], shapes[2][3]
    if any(size % 8 or size > _MOST_FEATURES for size in features):
        return f"heads of {features[0]} and {features[1]} features (multiples of 8 up to {_MOST_FEATURES} are served)"
    return None


class _Saved(NamedTuple):
    """What the derivative needs. alive: None, or 1 where a query may attend anywhere, else 0."""

    spec: Spec
    arrays: dict[str, Array]
    alive: Array | None
    given: tuple[Any, ...]


def _forward(
    query: Array,
    key: Array,
    value: Array,
    mask: Array | None,
    bias: Array | None,
    keep: Array | None,
    *,
    causal: bool,
    scale: float,
    keep_probability: float,
    save: bool,
) -> tuple[Array, Any]:
    xp, given = array_namespace(query), (query, key, value, mask, bias, keep)
    arrays = dict(zip(("query", "key", "value"), map(_readable, given[:3]), strict=True))
    inferring, training, backward = _specs_of(given, causal, scale)
    spec, alive = training if save else inferring, None
    if spec.bias is not None:
        arrays["bias"], alive = _additive(mask, bias, query, spec.bias, causal)
    if spec.padded or (save and backward.padded):
        arrays |= _lengths(mask if spec.padded else None, query, key)
    dropping = {} if keep is None else _dropping(keep, keep_probability, query)
    arrays["output"] = _empty(xp, (*query.shape[:3], value.shape[3]), query.dtype)
    if save:
        arrays["stats"] = xp.empty((*query.shape[:3], 1), dtype=xp.float32)
    # A derivative that cannot be built is to be known before, not after, the forward.
    if (save and not cupy_cudnn_plans.ready(backward)) or not cupy_cudnn_plans.run(spec, arrays | dropping):
        settings: dict[str, Any] = {"causal": causal, "scale": scale, "keep_probability": keep_probability}
        return cupy_attention.forward(*given, save=save, **settings)
    if alive is not None:
        arrays["output"] *= alive
    return arrays["output"], _Saved(backward, arrays, alive, given) if save else None


def _vjp(g: Array, residuals: Any, needs: Any, **static: Any) -> Any:
    """cuDNN's, with the cotangents of closed rows taken out first: then all that follows from them is zero."""
    if not isinstance(residuals, _Saved):
        return cupy_attention.vjp(g, residuals, needs, **static)
    xp, arrays, spec = array_namespace(g), dict(residuals.arrays), residuals.spec
    if spec.dropped:
        arrays |= _dropping(residuals.given[5], static["keep_probability"], residuals.given[0])
    g = g if residuals.alive is None else g * residuals.alive
    arrays["g"] = g if _lies_packed(g) else _copied(g)
    for name in ("query", "key", "value"):
        arrays["d" + name] = _empty(xp, arrays[name].shape, g.dtype)
    if spec.padded:  # what lies beyond the lengths is not written
        arrays["dkey"][...] = arrays["dvalue"][...] = 0.0
    # That of a bias would take cuDNN memory for queries times keys, too.
    if not needs[4] and cupy_cudnn_plans.run(spec, arrays):
        return arrays["dquery"], arrays["dkey"], arrays["dvalue"], None, None, None
    _, again = cupy_attention.forward(*residuals.given, save=True, **static)
    return cupy_attention.vjp(g, again, needs, **static)


# --- what is built for a call -----------------------------------------------------------------------------------------


_Memory = tuple[tuple[int, ...], tuple[int, ...], bool]  # shape, strides in bytes, and whether its address is aligned


class _Call(NamedTuple):
    """What the arrays of a call say. masks: the shapes of mask and bias, or None."""

    dtype: str
    query: _Memory
    key: _Memory
    value: _Memory
    masks: tuple[Any, Any]
    dropped: bool


def _memory(x: Array) -> _Memory:
    return x.shape, x.strides, cupy_products.pointer(x) % _ALIGNMENT == 0


def _specs_of(arrays: tuple[Any, ...], causal: bool, scale: float) -> tuple[Spec, Spec, Spec]:
    """The specs of a call: forward, forward with what the derivative needs, derivative."""
    query, key, value, mask, bias, keep = arrays
    shapes = None if mask is None else mask.shape, None if bias is None else bias.shape
    call = _Call(dtype_name(query.dtype), _memory(query), _memory(key), _memory(value), shapes, keep is not None)
    return _specs(call, causal, scale, cupy_cudnn_plans.repeatable())


@functools.lru_cache(maxsize=4096)
def _specs(call: _Call, causal: bool, scale: float, repeatable: bool) -> tuple[Spec, Spec, Spec]:
    """From what distinguishes calls, since finding it all out anew takes longer than cuDNN does.

    Causal means that the last query sees the last key: the bottom right corner. A mask that is the same for all queries
    of a sentence is told as lengths, too, so that what lies beyond them is not computed. With a bias, cuDNN's
    derivative leaves what is beyond the last whole tile unmasked, and makes NaN where a row's logsumexp is low (pytorch
    issue 196678, cudnn-frontend issue 160), unless lengths are given: those of all queries and keys will do.
    """
    dtype, query, key, value, masks, dropped = call
    queries, keys = query[0][2], key[0][2]
    corner = ("top_left" if queries == keys else "bottom_right") if causal else ""
    bias = _additive_layout(*masks, query[0], key[0])
    padded = masks[0] is not None and {*masks[0][-3:-1]} <= {1}
    whole = bias is not None and bool(queries % _TILE or keys % _TILE)
    layouts = _layout(*query), _layout(*key), _layout(*value)
    inferring = Spec(False, dtype, *layouts, bias, corner, float(scale), padded, dropped, False, False)
    backward = inferring._replace(backward=True, padded=padded or whole, repeatable=repeatable)
    return inferring, inferring._replace(stats=True), backward


def _layout(shape: Any, strides: tuple[int, ...], aligned: bool) -> Layout:
    """How an array lies, or its copy where cuDNN could not read it; axes of one element are laid as if packed."""
    own = packed(*shape)
    if not _is_readable(shape, strides, aligned):
        return own
    sizes = zip(shape, strides, own[1], strict=True)
    return own[0], tuple(step if size == 1 else stride // _BYTES for size, stride, step in sizes)  # type: ignore[return-value]


@functools.lru_cache(maxsize=4096)
def _is_readable(shape: tuple[int, ...], strides: tuple[int, ...], aligned: bool) -> bool:
    between = [stride for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    return aligned and strides[-1] == _BYTES and all(step > 0 and step % _ALIGNMENT == 0 for step in between)


def _lies_packed(x: Array) -> bool:
    memory = _memory(x)
    return _is_readable(*memory) and _layout(*memory) == packed(*x.shape)


def _readable(x: Array) -> Array:
    return x if _is_readable(*_memory(x)) else _copied(x)


def _copied(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)


def _empty(xp: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    batch, heads, length, features = shape
    return xp.permute_dims(xp.empty((batch, length, heads, features), dtype=dtype), (0, 2, 1, 3))


# --- masks ------------------------------------------------------------------------------------------------------------


def _additive_layout(mask: Any, bias: Any, query: tuple[int, ...], key: tuple[int, ...]) -> Layout | None:
    """How the sum of both lies: (batch, 1, 1, keys) or (1 or batch, 1 or heads, queries, keys), its rows aligned.

    From the shapes of the four; mask and bias may be None.
    """
    sizes = [(1,) * (4 - len(shape)) + tuple(shape) for shape in (mask, bias) if shape is not None]
    if not sizes:
        return None
    batch, heads, queries = (max(axis) for axis in list(zip(*sizes, strict=True))[:3])
    if heads == queries == 1:
        batch = query[0]
    else:
        queries = query[2]
    return in_rows(batch, heads, queries, key[2])


def _additive(
    mask: Array | None, bias: Array | None, query: Array, layout: Layout, causal: bool
) -> tuple[Array, Array]:
    """What is added to the scores, laid out for cuDNN, and which queries may attend anywhere, as 1 or 0.

    Rows closed to all keys get zeros here, and their output is multiplied by 0 afterwards: a logsumexp of an ordinary
    size keeps the derivative finite. Only where a row of the sum serves several queries, some of which a causal mask
    leaves without any open key, do scores stay at _FORBIDDEN throughout, which is finite, too.
    """
    xp, (*before, rows, keys) = array_namespace(query), layout[0]
    allowed: Any = None if mask is None else _four(mask)
    if bias is not None:
        finite = _four(bias) != -math.inf
        allowed = finite if allowed is None else xp.logical_and(allowed, finite)
    allowed = xp.broadcast_to(allowed, (*allowed.shape[:-1], keys))
    low = xp.full((1, 1, 1, 1), _FORBIDDEN, dtype=query.dtype)
    added = _rows((*before, rows, keys), query)
    added[...] = xp.where(allowed, xp.zeros_like(low) if bias is None else _four(bias), low)
    if causal and rows == 1:  # there are as many queries as keys, and query i sees those up to i
        seen = xp.cumulative_sum(xp.astype(allowed, xp.int32), axis=-1)
        return added, xp.astype(xp.permute_dims(seen, (0, 1, 3, 2)) > 0, query.dtype)
    seen = xp.logical_and(allowed, causal_mask(xp, keys, keys, device(query))) if causal else allowed
    alive = xp.astype(xp.any(seen, axis=-1, keepdims=True), query.dtype)
    added *= alive
    return added, alive


def _rows(shape: tuple[int, ...], like: Array) -> Array:
    """An empty array that lies as in_rows says."""
    return array_namespace(like).empty((*shape[:-1], in_rows(*shape)[1][2]), dtype=like.dtype)[..., : shape[-1]]


def _dropping(keep: Array, keep_probability: float, query: Array) -> dict[str, Array]:
    """Which weights are kept, as numbers, and what those are multiplied by."""
    xp, kept = array_namespace(query), _rows(keep.shape, query)
    kept[...] = keep
    numbers = {"scale": 1.0 / keep_probability, "scale_inverse": keep_probability}
    return {"keep": kept} | {name: xp.full((1, 1, 1, 1), x, dtype=xp.float32) for name, x in numbers.items()}


def _lengths(mask: Array | None, query: Array, key: Array) -> dict[str, Array]:
    """How many queries and keys of each sentence count, int32: all, or keys up to the last that a mask allows.

    One at least: a row without keys would have no output, not even one to be multiplied by zero.
    """
    xp, batch, (queries, keys) = array_namespace(query), len(query), (query.shape[2], key.shape[2])
    sizes = {"query_lengths": queries, "key_lengths": keys}
    lengths = {name: xp.full((batch, 1, 1, 1), size, dtype=xp.int32) for name, size in sizes.items()}
    if mask is not None:
        ends = xp.where(_four(mask), xp.arange(1, keys + 1, dtype=xp.int32), xp.ones((1,), dtype=xp.int32))
        lengths["key_lengths"][...] = xp.max(ends, axis=-1, keepdims=True)
    return lengths


def _four(x: Array) -> Array:
    return x.reshape((1,) * (4 - len(x.shape)) + tuple(x.shape))


for _operation in ("attention", "grouped_attention"):
    register(
        Kernel(
            f"cudnn.{_operation}",
            _operation,
            "cupy",
            supports,
            _forward,
            _vjp,
            priority=10,
            kind="cudnn",
            tolerance=2e-2,
        )
    )
