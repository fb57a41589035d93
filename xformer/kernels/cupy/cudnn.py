"""Fused attention on CuPy by cuDNN, for float16 and bfloat16: scores are not stored, forward or backward.

`why_not` excludes what cuDNN cannot compute, or is known to compute incorrectly. If a plan cannot be built, the kernel
falls back to the kernel of `cupy.py`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from xformer.backends import NativeArray as Array
from xformer.backends import array_namespace, dtype_name
from xformer.kernels.cupy import attention as cupy_attention
from xformer.kernels.cupy import cublas, cudnn_plans, launch
from xformer.kernels.cupy.attention import empty_heads as _empty
from xformer.kernels.cupy.calls import forbid_repeating
from xformer.kernels.cupy.cudnn_plans import DTYPES, Layout, Spec, aligned_rows, packed
from xformer.native import is_reproducible
from xformer.ops.attention import shared
from xformer.ops.operation import Kernel

_ALIGNMENT = 16  # bytes, of addresses and strides; otherwise cuDNN reads wrong elements (cudnn-frontend issue 1571)
_ITEMSIZE = 2  # bytes
_MAX_FEATURES = 256
_THREADS, _PARTS = 256, 8  # of a block, and blocks of a sentence
_MASKS = np.dtype([("sizes", "i4", 6), ("mask", "i8", 4), ("bias", "i8", 4)])  # the struct of cuda/masking.cu
_TILE = 128  # queries and keys of a tile of cuDNN's derivative
_MIN_KEYS = 33  # for fewer, our own kernel computes a sixteenth of the scores
_SCALES = "dropout_scale", "dropout_scale_inverse"
_MIN_SCORES = 2**22  # of all heads; for fewer, a plan takes too long to build


def why_not(*arrays: Any, causal: bool, scale: float, window: int = 0, **options: Any) -> str | None:
    """Return why cuDNN does not support the call, or None."""
    query, key, value, *masks = arrays
    (batch, heads, queries, head_dim), keys, value_dim = query.shape, key.shape[2], value.shape[3]
    if reason := launch.why_not(query):
        return reason
    if 0 in (*query.shape, *key.shape, *value.shape):
        return "an empty array"
    if any(size % 8 or size > _MAX_FEATURES for size in (head_dim, value_dim)):
        return f"heads of {head_dim} and {value_dim} features (cuDNN takes multiples of 8 up to {_MAX_FEATURES})"
    if masks[2] is not None and tuple(masks[2].shape) != (batch, heads, queries, keys):
        return "the dropout mask is broadcast"
    if keys < _MIN_KEYS and cupy_attention.has_short_heads(query, value):
        return f"{keys} keys; cuDNN computes tiles of {_TILE}"
    if is_reproducible():
        return "in reproducible mode, in which no choice depends on the size of the batch"
    if queries == 1:
        return "a single query: every length of decoding would need a plan"
    if (scores := batch * heads * queries * keys) < _MIN_SCORES:
        return f"{scores} scores; expected at least {_MIN_SCORES} for a plan to pay off"
    if (causal or window) and queries > keys:
        return "causal, or a window, with fewer keys than queries"
    if causal and queries < keys and any(x is not None for x in masks):
        return "causal with more keys than queries and a mask, a bias or dropout"
    if window and any(x is not None for x in masks):
        return "a window with a mask, a bias or dropout"
    return cudnn_plans.unsupported_reason(*_specs_of(arrays, causal, scale, window))


class _Saved(NamedTuple):
    """Residuals; is_padded: whether lengths are those of a mask."""

    spec: Spec
    arrays: dict[str, Array]
    is_padded: bool
    inputs: tuple[Any, ...]


def _forward(
    *inputs: Any, causal: bool, scale: float, keep_probability: float, save: bool, window: int = 0
) -> tuple[Array, Any]:
    query, key, value, mask, bias, dropout_mask = inputs
    xp = array_namespace(query)
    arrays = dict(zip(("query", "key", "value"), map(_readable, inputs[:3]), strict=True))
    inference, training, backward = _specs_of(inputs, causal, scale, window)
    spec = training if save else inference
    if spec.bias is not None:
        has_lengths = spec.padded or (save and backward.padded)
        key_of = query.dtype, query.shape, spec.bias, spec.padded, causal, has_lengths
        settings: dict[str, Any] = {"causal": causal, "has_lengths": has_lengths}
        make = functools.partial(_mask_inputs, mask, bias, query, spec, **settings)
        # Calls that repeat without a derivative know only the arrays that they get.
        arrays |= shared(make, (mask, bias), *key_of) if save else make()
    dropout = {} if dropout_mask is None else _dropout_inputs(dropout_mask, query)
    arrays["output"] = _empty(query, (*query.shape[:3], value.shape[3]))
    if save:
        arrays["stats"] = launch.empty(query, (*query.shape[:3], 1), xp.float32)
    # Find out before the forward, not after it, whether the derivative can be built.
    if (save and not cudnn_plans.ready(backward)) or not cudnn_plans.run(spec, arrays | dropout):
        settings = {"causal": causal, "scale": scale, "keep_probability": keep_probability}
        return cupy_attention.forward(*inputs, save=save, window=window, **settings)
    if spec.bias is not None:
        _clear_rows(arrays, keys=key.shape[2], causal=causal)
    output = arrays["output"] if dropout_mask is None else _scaled(arrays["output"], 1.0 / keep_probability)
    return output, _Saved(backward, arrays, spec.padded, inputs) if save else None


def _vjp(g: Array, residuals: Any, needs: Any, **options: Any) -> Any:
    if not isinstance(residuals, _Saved):
        return cupy_attention.vjp(g, residuals, needs, **options)
    arrays = dict(residuals.arrays)
    scaled = g
    if residuals.spec.dropout:
        arrays |= _dropout_inputs(residuals.inputs[5], residuals.inputs[0])
        scaled = _scaled(g, 1.0 / options["keep_probability"])
    arrays["g"] = scaled = _readable(scaled)
    spec = residuals.spec._replace(g=_layout(*_memory(scaled)))
    for name in ("query", "key", "value"):
        arrays["d" + name] = _empty(g, arrays[name].shape)
    # For the cotangent of a bias cuDNN needs memory for queries times keys, too.
    if not needs[4] and cudnn_plans.run(spec, arrays):
        if residuals.is_padded:
            _clear_beyond(arrays["dkey"], arrays["dvalue"], arrays["key_lengths"])
        return arrays["dquery"], arrays["dkey"], arrays["dvalue"], None, None, None
    return cupy_attention.recomputed_vjp(g, residuals.inputs, needs, **options)


# --- specs ------------------------------------------------------------------------------------------------------------


_Memory = tuple[tuple[int, ...], tuple[int, ...], bool]  # shape, strides in bytes, whether the address is aligned


def _memory(x: Array) -> _Memory:
    return x.shape, x.strides, cublas.pointer(x) % _ALIGNMENT == 0


def _specs_of(arrays: tuple[Any, ...], causal: bool, scale: float, window: int = 0) -> tuple[Spec, ...]:
    """Return the specs of a call: inference, forward with stats, backward."""
    shapes = tuple(None if x is None else x.shape for x in arrays[3:5])
    call: Any = dtype_name(arrays[0].dtype), *map(_memory, arrays[:3]), shapes, arrays[5] is not None
    return _specs(*call, causal, scale, window, cudnn_plans.deterministic())


@functools.lru_cache(maxsize=4096)
def _specs(dtype: str, query: _Memory, key: _Memory, value: _Memory, masks: Any, *settings: Any) -> tuple[Spec, ...]:
    """Return the specs of a call, cached because computing them takes longer than cuDNN itself.

    The last query sees the last key: the bottom right corner. A mask that is the same for all queries of a sentence is
    also passed as lengths, where that lets cuDNN skip many keys. With a bias, cuDNN's derivative does not mask the part
    beyond the last full tile, and returns NaN for rows with a low logsumexp (pytorch issue 196678, cudnn-frontend issue
    160), unless lengths are given; those of all queries and keys are enough.
    """
    dropout, causal, scale, window, deterministic = settings
    queries, keys = query[0][2], key[0][2]
    corner = ("top_left" if queries == keys else "bottom_right") if causal or window else ""
    bias = _bias_layout(masks[0], masks[1], query[0], key[0])
    # Lengths take a launch more; a single tile is never skipped, and few pairs are beyond the lengths of causal rows.
    padded = masks[0] is not None and {*masks[0][-3:-1]} <= {1} and keys > _TILE and not causal
    needs_lengths = bias is not None and bool(queries % _TILE or keys % _TILE)
    layouts = _layout(*query), _layout(*key), _layout(*value)
    inference = Spec(False, dtype, *layouts, bias, corner, float(scale), padded, dropout, False, False)
    inference = inference._replace(window=window, after=0 if causal else max(0, window - 1))
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


def _mask_inputs(
    mask: Array | None, bias: Array | None, query: Array, spec: Spec, *, causal: bool, has_lengths: bool
) -> dict[str, Array]:
    """Return the sum of mask and bias in cuDNN's layout, the first key of each of its rows, and lengths if needed.

    A fully masked row gets zeros here, and zeros as its output afterwards, so that its logsumexp, and the derivative,
    stay finite. Only if several queries share a row of the sum, and a causal mask hides all keys from some of them, do
    all scores of a query stay low, which is finite, too.
    """
    xp, batch, ((*rows, keys), strides) = array_namespace(query), len(query), spec.bias or packed(0, 0, 0, 0)
    arrays = {"bias": _empty_rows((*rows, keys), query), "firsts": launch.empty(query, tuple(rows), xp.int32)}
    if has_lengths:
        arrays |= {f"{name}_lengths": launch.empty(query, (batch, 1, 1, 1), xp.int32) for name in ("query", "key")}
    described = [None if x is None else (x.shape, x.strides) for x in (mask, bias)]
    table = _masks((*rows, query.shape[2], keys, strides[2]), *described)
    grid, dtypes = launch.grid_for_rows(arrays["firsts"].size, arrays["bias"]), launch.dtype_names(query)
    written = arrays["bias"], arrays["firsts"], arrays.get("query_lengths"), arrays.get("key_lengths")
    launch.launch("masking.inputs", dtypes, *grid, table, mask, bias, *written, batch, int(causal), int(spec.padded))
    return arrays


@functools.lru_cache(maxsize=4096)
def _masks(sizes: tuple[int, ...], mask: Any, bias: Any) -> Any:
    """Return the struct Masks of cuda/masking.cu."""
    table = np.zeros(1, _MASKS)
    table["sizes"] = sizes
    for name, array, step in (("mask", mask, 1), ("bias", bias, _ITEMSIZE)):
        if array is not None:
            table[name] = cupy_attention.four_strides(array, step)
    table.flags.writeable = False
    return table


def _clear_rows(arrays: dict[str, Array], *, keys: int, causal: bool) -> None:
    """Set the output of fully masked rows to zero, and their logsumexp so high that no derivative comes from them."""
    output, firsts = arrays["output"], arrays["firsts"]
    batch, heads, queries, features = output.shape
    count, last = batch * heads * queries, keys - queries if causal else keys
    strides = (stride // 4 if size > 1 else 0 for size, stride in zip(firsts.shape, firsts.strides, strict=True))
    sizes = count, heads, queries, features, *strides, last
    blocks = min(2**14, -(-count // _THREADS))
    written = output, arrays.get("stats"), firsts
    launch.launch("masking.clear_rows", launch.dtype_names(output), blocks, _THREADS, *written, *sizes)


def _clear_beyond(dkey: Array, dvalue: Array, lengths: Array) -> None:
    """Set what belongs to keys beyond the lengths, which cuDNN does not write, to zero."""
    batch, heads, keys, features = dkey.shape
    sizes = keys, heads * features, heads * dvalue.shape[3], _PARTS
    dtypes = launch.dtype_names(dkey)
    launch.launch("masking.clear_beyond", dtypes, batch * _PARTS, _THREADS, dkey, dvalue, lengths, *sizes)


def _empty_rows(shape: tuple[int, ...], like: Array) -> Array:
    """Allocate an array with the layout `aligned_rows`."""
    return launch.empty(like, (*shape[:-1], aligned_rows(*shape)[1][2]))[..., : shape[-1]]


def _dropout_inputs(dropout_mask: Array, query: Array) -> dict[str, Array]:
    """Return the dropout mask in the dtype of the query, and scales of 1.

    Output and cotangent are divided by the keep probability instead: cuDNN's derivative (9.19) multiplies by its
    scale where it should not, so that the gradient of the query is wrong.
    """
    xp, mask = array_namespace(query), _empty_rows(dropout_mask.shape, query)
    forbid_repeating()
    mask[...] = dropout_mask
    return {"dropout_mask": mask} | dict.fromkeys(_SCALES, xp.ones((1, 1, 1, 1), dtype=xp.float32))


def _scaled(x: Array, factor: float) -> Array:
    """Return x times a factor, which is not rounded to the 16 bits of x."""
    xp = array_namespace(x)
    return xp.astype(xp.astype(x, xp.float32) * factor, x.dtype)


_TOLERANCE = 2e-2
KERNELS = [
    Kernel("cudnn.attention", "attention", "cupy", _forward, _vjp, tuple(DTYPES), why_not, "no-cudnn", _TOLERANCE)
]
