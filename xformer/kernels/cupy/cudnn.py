"""Fused attention on CuPy by cuDNN, for float16 and bfloat16: scores are not stored, forward or backward.

`why_not` excludes what cuDNN cannot compute, or is known to compute incorrectly. If a plan cannot be built, the kernel
falls back to the kernel of `cupy.py`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from xformer.backends import NativeArray as Array
from xformer.backends import array_namespace, device, dtype_name
from xformer.kernels.cupy import attention as cupy_attention
from xformer.kernels.cupy import cublas, cudnn_plans, launch
from xformer.kernels.cupy.cudnn_graph import DTYPES, Layout, Spec, aligned_rows, packed
from xformer.native import is_reproducible
from xformer.ops.attention import causal_mask
from xformer.ops.operation import Kernel

_ALIGNMENT = 16  # bytes, of addresses and strides; otherwise cuDNN reads wrong elements (cudnn-frontend issue 1571)
_ITEMSIZE = 2  # bytes
_MAX_FEATURES = 256
# Bias of a masked key, the lowest float16; -inf in a whole row would give NaN.
_MASKED = -65504.0
_TILE = 128  # queries and keys of a tile of cuDNN's derivative
_MIN_KEYS = 33  # for fewer, our own kernel computes a sixteenth of the scores
_SCALES = "dropout_scale", "dropout_scale_inverse"
_MIN_SCORES = 2**22  # of all heads; for fewer, a plan takes too long to build


def why_not(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    bias: Any,
    dropout_mask: Any,
    *,
    causal: bool,
    scale: float,
    save: bool,
    **options: Any,
) -> str | None:
    """Return why cuDNN does not support the call, or None."""
    (batch, heads, queries, head_dim), keys, value_dim = query.shape, key.shape[2], value.shape[3]
    if reason := launch.why_not(query):
        return reason
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "an empty array"
    if any(size % 8 or size > _MAX_FEATURES for size in (head_dim, value_dim)):
        return f"heads of {head_dim} and {value_dim} features (cuDNN takes multiples of 8 up to {_MAX_FEATURES})"
    if dropout_mask is not None and tuple(dropout_mask.shape) != (batch, heads, queries, keys):
        return "the dropout mask is broadcast"
    if keys < _MIN_KEYS and cupy_attention.is_short(query, value):
        return f"{keys} keys; cuDNN computes tiles of {_TILE}"
    if is_reproducible():
        return "in reproducible mode, in which no choice depends on the size of the batch"
    if queries == 1:
        return "a single query: every length of decoding would need a plan"
    if (scores := batch * heads * queries * keys) < _MIN_SCORES:
        return f"{scores} scores; expected at least {_MIN_SCORES} for a plan to pay off"
    if causal and queries > keys:
        return "causal with fewer keys than queries"
    if causal and queries < keys and any(x is not None for x in (mask, bias, dropout_mask)):
        return "causal with more keys than queries and a mask, a bias or dropout"
    arrays = query, key, value, mask, bias, dropout_mask
    return cudnn_plans.unsupported_reason(*_specs_of(arrays, causal, scale))


class _Saved(NamedTuple):
    """Residuals; has_keys: None, or 1 where a query may attend to some key, else 0."""

    spec: Spec
    arrays: dict[str, Array]
    has_keys: Array | None
    inputs: tuple[Any, ...]


def _forward(*inputs: Any, causal: bool, scale: float, keep_probability: float, save: bool) -> tuple[Array, Any]:
    query, key, value, mask, bias, dropout_mask = inputs
    xp = array_namespace(query)
    arrays = dict(zip(("query", "key", "value"), map(_readable, inputs[:3]), strict=True))
    inference, training, backward = _specs_of(inputs, causal, scale)
    spec, has_keys = training if save else inference, None
    if spec.bias is not None:
        arrays["bias"], has_keys = _attn_bias(mask, bias, query, spec.bias, causal)
    if spec.padded or (save and backward.padded):
        arrays |= _lengths(mask if spec.padded else None, query, key)
    dropout = {} if dropout_mask is None else _dropout_inputs(dropout_mask, query)
    arrays["output"] = _empty(xp, (*query.shape[:3], value.shape[3]), query.dtype)
    if save:
        arrays["stats"] = xp.empty((*query.shape[:3], 1), dtype=xp.float32)
    # Find out before the forward, not after it, whether the derivative can be built.
    if (save and not cudnn_plans.ready(backward)) or not cudnn_plans.run(spec, arrays | dropout):
        settings: dict[str, Any] = {"causal": causal, "scale": scale, "keep_probability": keep_probability}
        return cupy_attention.forward(*inputs, save=save, **settings)
    if has_keys is not None:
        arrays["output"] *= has_keys
    output = arrays["output"] if dropout_mask is None else _scaled(arrays["output"], 1.0 / keep_probability)
    return output, _Saved(backward, arrays, has_keys, inputs) if save else None


def _vjp(g: Array, residuals: Any, needs: Any, **options: Any) -> Any:
    """Run cuDNN, with the cotangents of fully masked rows set to zero first."""
    if not isinstance(residuals, _Saved):
        return cupy_attention.vjp(g, residuals, needs, **options)
    xp, arrays = array_namespace(g), dict(residuals.arrays)
    scaled = g
    if residuals.spec.dropout:
        arrays |= _dropout_inputs(residuals.inputs[5], residuals.inputs[0])
        scaled = _scaled(g, 1.0 / options["keep_probability"])
    arrays["g"] = scaled = _readable(scaled if residuals.has_keys is None else scaled * residuals.has_keys)
    spec = residuals.spec._replace(g=_layout(*_memory(scaled)))
    for name in ("query", "key", "value"):
        arrays["d" + name] = _empty(xp, arrays[name].shape, g.dtype)
    if spec.padded:  # cuDNN does not write beyond the lengths
        for name in ("dkey", "dvalue"):
            arrays[name].transpose(0, 2, 1, 3)[...] = 0.0  # in C order, which CuPy fills at once
    # For the cotangent of a bias cuDNN needs memory for queries times keys, too.
    if not needs[4] and cudnn_plans.run(spec, arrays):
        return arrays["dquery"], arrays["dkey"], arrays["dvalue"], None, None, None
    return cupy_attention.recomputed_vjp(g, residuals.inputs, needs, **options)


# --- specs ------------------------------------------------------------------------------------------------------------


_Memory = tuple[tuple[int, ...], tuple[int, ...], bool]  # shape, strides in bytes, whether the address is aligned


class _Call(NamedTuple):
    """The key of a call for the cache of specs; masks: the shapes of mask and bias, or None."""

    dtype: str
    query: _Memory
    key: _Memory
    value: _Memory
    masks: tuple[Any, Any]
    dropout: bool


def _memory(x: Array) -> _Memory:
    return x.shape, x.strides, cublas.pointer(x) % _ALIGNMENT == 0


def _specs_of(arrays: tuple[Any, ...], causal: bool, scale: float) -> tuple[Spec, Spec, Spec]:
    """Return the specs of a call: inference, forward with stats, backward."""
    query, key, value, mask, bias, dropout_mask = arrays
    shapes = None if mask is None else mask.shape, None if bias is None else bias.shape
    call = _Call(
        dtype_name(query.dtype), _memory(query), _memory(key), _memory(value), shapes, dropout_mask is not None
    )
    return _specs(call, causal, scale, cudnn_plans.deterministic())


@functools.lru_cache(maxsize=4096)
def _specs(call: _Call, causal: bool, scale: float, deterministic: bool) -> tuple[Spec, Spec, Spec]:
    """Return the specs of a call, cached because computing them takes longer than cuDNN itself.

    The last query sees the last key: the bottom right corner. A mask that is the same for all queries of a sentence is
    also passed as lengths, so that cuDNN skips the keys beyond. With a bias, cuDNN's derivative does not mask the part
    beyond the last full tile, and returns NaN for rows with a low logsumexp (pytorch issue 196678, cudnn-frontend issue
    160), unless lengths are given; those of all queries and keys are enough.
    """
    dtype, query, key, value, masks, dropout = call
    queries, keys = query[0][2], key[0][2]
    corner = ("top_left" if queries == keys else "bottom_right") if causal else ""
    bias = _bias_layout(*masks, query[0], key[0])
    padded = masks[0] is not None and {*masks[0][-3:-1]} <= {1}
    needs_lengths = bias is not None and bool(queries % _TILE or keys % _TILE)
    layouts = _layout(*query), _layout(*key), _layout(*value)
    inference = Spec(False, dtype, *layouts, bias, corner, float(scale), padded, dropout, False, False)
    training = inference._replace(stats=True)
    if bias is not None:  # with one row for all queries, cuDNN's derivative (9.19) is zero
        training = training._replace(bias=aligned_rows(*bias[0][:2], queries, keys))
    backward = training._replace(backward=True, stats=False, padded=padded or needs_lengths)
    g = packed(query[0][0], query[0][1], queries, value[0][3])  # as layers make it
    return inference, training, backward._replace(deterministic=deterministic, g=g)


@functools.lru_cache(maxsize=4096)
def _layout(shape: Any, strides: tuple[int, ...], aligned: bool) -> Layout:
    """Return the layout of an array, or of its copy if cuDNN cannot read it; axes of size 1 have packed strides."""
    packed_layout = packed(*shape)
    if not _is_readable(shape, strides, aligned):
        return packed_layout
    sizes = zip(shape, strides, packed_layout[1], strict=True)
    return packed_layout[0], tuple(step if size == 1 else stride // _ITEMSIZE for size, stride, step in sizes)  # type: ignore[return-value]


@functools.lru_cache(maxsize=4096)
def _is_readable(shape: tuple[int, ...], strides: tuple[int, ...], aligned: bool) -> bool:
    outer = [stride for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    return aligned and strides[-1] == _ITEMSIZE and all(step > 0 and step % _ALIGNMENT == 0 for step in outer)


def _readable(x: Array) -> Array:
    return x if _is_readable(*_memory(x)) else _packed_copy(x)


def _packed_copy(x: Array) -> Array:
    return x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)


def _empty(xp: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    batch, heads, length, features = shape
    return xp.permute_dims(xp.empty((batch, length, heads, features), dtype=dtype), (0, 2, 1, 3))


# --- masks ------------------------------------------------------------------------------------------------------------


def _bias_layout(mask: Any, bias: Any, query: tuple[int, ...], key: tuple[int, ...]) -> Layout | None:
    """Return the layout of the sum of mask and bias, given four shapes; mask and bias may be None.

    The shape is (batch, 1, 1, keys) or (1 or batch, 1 or heads, queries, keys); the rows are aligned.
    """
    sizes = [(1,) * (4 - len(shape)) + tuple(shape) for shape in (mask, bias) if shape is not None]
    if not sizes:
        return None
    batch, heads, queries = (max(axis) for axis in list(zip(*sizes, strict=True))[:3])
    if heads == queries == 1:
        batch = query[0]
    else:
        queries = query[2]
    return aligned_rows(batch, heads, queries, key[2])


def _attn_bias(
    mask: Array | None, bias: Array | None, query: Array, layout: Layout, causal: bool
) -> tuple[Array, Array]:
    """Return the sum of mask and bias in cuDNN's layout, and 1 where a query may attend to some key, else 0.

    A fully masked row gets zeros here, and its output is multiplied by 0 afterwards, so that its logsumexp, and the
    derivative, stay finite. Only if several queries share a row of the sum, and a causal mask hides all keys from some
    of them, do all scores of a query stay at _MASKED, which is finite, too.
    """
    xp, (*batch, rows, keys) = array_namespace(query), layout[0]
    allowed: Any = None if mask is None else _to_4d(mask)
    if bias is not None:
        finite = _to_4d(bias) != -math.inf
        allowed = finite if allowed is None else xp.logical_and(allowed, finite)
    allowed = xp.broadcast_to(allowed, (*allowed.shape[:-1], keys))
    masked = xp.full((1, 1, 1, 1), _MASKED, dtype=query.dtype)
    attn_bias = _empty_rows((*batch, rows, keys), query)
    attn_bias[...] = xp.where(allowed, xp.zeros_like(masked) if bias is None else _to_4d(bias), masked)
    if causal and rows == 1:  # there are as many queries as keys, and query i sees those up to i
        visible = xp.cumulative_sum(xp.astype(allowed, xp.int32), axis=-1)
        return attn_bias, xp.astype(xp.permute_dims(visible, (0, 1, 3, 2)) > 0, query.dtype)
    visible = xp.logical_and(allowed, causal_mask(xp, keys, keys, device(query))) if causal else allowed
    has_keys = xp.astype(xp.any(visible, axis=-1, keepdims=True), query.dtype)
    attn_bias *= has_keys
    return attn_bias, has_keys


def _empty_rows(shape: tuple[int, ...], like: Array) -> Array:
    """Allocate an array with the layout `aligned_rows`."""
    return array_namespace(like).empty((*shape[:-1], aligned_rows(*shape)[1][2]), dtype=like.dtype)[..., : shape[-1]]


def _dropout_inputs(dropout_mask: Array, query: Array) -> dict[str, Array]:
    """Return the dropout mask in the dtype of the query, and scales of 1.

    Output and cotangent are divided by the keep probability instead: cuDNN's derivative (9.19) multiplies by its
    scale where it should not, so that the gradient of the query is wrong.
    """
    xp, mask = array_namespace(query), _empty_rows(dropout_mask.shape, query)
    mask[...] = dropout_mask
    return {"dropout_mask": mask} | dict.fromkeys(_SCALES, xp.ones((1, 1, 1, 1), dtype=xp.float32))


def _scaled(x: Array, factor: float) -> Array:
    """Return x times a factor, which is not rounded to the 16 bits of x."""
    xp = array_namespace(x)
    return xp.astype(xp.astype(x, xp.float32) * factor, x.dtype)


def _lengths(mask: Array | None, query: Array, key: Array) -> dict[str, Array]:
    """Return the lengths of queries and keys, int32: all, or keys up to the last one that a mask allows.

    They are at least 1: cuDNN would not write the output of a row without keys.
    """
    xp, batch, (queries, keys) = array_namespace(query), len(query), (query.shape[2], key.shape[2])
    sizes = {"query_lengths": queries, "key_lengths": keys}
    lengths = {name: xp.full((batch, 1, 1, 1), size, dtype=xp.int32) for name, size in sizes.items()}
    if mask is not None:
        ends = xp.where(_to_4d(mask), xp.arange(1, keys + 1, dtype=xp.int32), xp.ones((1,), dtype=xp.int32))
        lengths["key_lengths"][...] = xp.max(ends, axis=-1, keepdims=True)
    return lengths


def _to_4d(x: Array) -> Array:
    return x.reshape((1,) * (4 - len(x.shape)) + tuple(x.shape))


KERNELS = [
    Kernel(
        "cudnn.attention",
        "attention",
        "cupy",
        _forward,
        _vjp,
        dtypes=tuple(DTYPES),
        why_not=why_not,
        disabled_by="no-cudnn",
        tolerance=2e-2,
    )
]
