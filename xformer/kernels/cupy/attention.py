"""Attention on CuPy by a kernel of our own, or by batched products, for calls that the cuDNN kernel does not support.

The kernel keeps no scores (cuda/attention.cu). Of products, memory grows with queries times keys; for float16 and
bfloat16, scores and softmax are float32, and the weights have the dtype of the arrays.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from xformer.backends import NativeArray as Array
from xformer.backends import accumulation_dtype, array_namespace
from xformer.kernels.cupy import launch
from xformer.kernels.cupy.cublas import batched_product
from xformer.kernels.cupy.launch import FLOATS, contiguous, empty, why_not
from xformer.ops.attention import attention_functions
from xformer.ops.operation import Kernel


def _product(a: Array, b: Array, scale: float | None = None, *, wide: bool = False) -> Array:
    dtype = accumulation_dtype(array_namespace(a), a.dtype) if wide else None
    return batched_product(a, b, alpha=1.0 if scale is None else scale, dtype=dtype)


forward, vjp = attention_functions(_product)


def recomputed_vjp(g: Array, inputs: Any, needs: Any, **options: Any) -> Any:
    """Compute the cotangents by products from the inputs of a forward that did not save the weights."""
    _, residuals = forward(*inputs, save=True, **options)
    return vjp(g, residuals, needs, **options)


# --- Without scores in memory (cuda/attention.cu) ---

_THREADS, _MAX_FEATURES = 128, 128
_FEW, _MANY = 16, 128
_FAR = 2**29  # keys before and after a query that it sees if there is no limit
# Layout of cuda/attention.cu.
_FOUR_AXES = "mask", "bias", "dropout_mask"
_WITH_ROWS = "query", "key", "value", "g", "new_key", "new_value"
_LAYOUT = np.dtype(
    [("sizes", "i4", 8), *((name, "i8", 3) for name in _WITH_ROWS), *((name, "i8", 4) for name in _FOUR_AXES)]
)


def has_short_heads(query: Array, value: Array) -> bool:
    """Return whether the kernel takes heads of so many features."""
    return max(query.shape[-1], value.shape[-1]) <= _MAX_FEATURES


def _tiles_why_not(query: Array, key: Array, value: Array, *masks: Any, **options: Any) -> str | None:
    if not has_short_heads(query, value):
        return f"heads of {query.shape[-1]} and {value.shape[-1]} features; expected at most {_MAX_FEATURES}"
    if query.shape[2] < _FEW and key.shape[2] > _MANY:
        return f"{query.shape[2]} queries of {key.shape[2]} keys: too few blocks, which read all keys in turn"
    return why_not(query)


def _tiles_forward(
    *inputs: Any, causal: bool, scale: float, keep_probability: float, save: bool, window: int = 0
) -> tuple[Array, Any]:
    """Save the logarithms of the sums of exponentials."""
    arrays = *map(with_contiguous_rows, inputs[:3]), *inputs[3:]
    query, _, value, *_ = arrays
    output = empty_heads(query, (*query.shape[:3], value.shape[3]))
    log_sums = empty(query, query.shape[:3], array_namespace(query).float32) if save else None
    layout = layout_of(arrays, causal=causal, window=window)
    settings = float(scale), 1.0 / keep_probability
    _launch("attention", (), query, layout, *arrays, output, log_sums, *settings)
    return output, (arrays, output, log_sums, inputs)


def _tiles_vjp(g: Array, residuals: Any, needs: Any, **options: Any) -> Any:
    arrays, output, log_sums, inputs = residuals
    if needs[4]:  # which has as many elements as there are scores
        return recomputed_vjp(g, inputs, needs, **options)
    query, key, value, *_ = arrays
    g = with_contiguous_rows(g)
    dquery, dkey, dvalue = (empty_heads(x, x.shape) for x in (query, key, value))
    layout = layout_of(arrays, g, causal=options["causal"], window=options.get("window", 0))
    settings = float(options["scale"]), 1.0 / options["keep_probability"]
    saved = layout, *arrays, output, g, log_sums, empty(log_sums)
    _launch("attention_vjp", ("0",), query, *saved, dquery, None, *settings)  # first, as it writes the corrections
    if needs[1] or needs[2]:
        _launch("attention_vjp", ("1",), key, *saved, dkey, dvalue, *settings)
    return dquery, dkey, dvalue, None, None, None


def _launch(kernel: str, template: tuple[str, ...], rows: Array, layout: tuple[Any, int], *arguments: Any) -> None:
    """Launch with a block for each tile of rows, of the queries or the keys."""
    table, size = layout
    batch, heads, length, _ = rows.shape
    tile = 16 if size > 64 else 32
    dtypes = *launch.dtype_names(rows), str(size), *template
    launch.launch(f"attention.{kernel}", dtypes, batch * heads * -(-length // tile), _THREADS, table, *arguments)


def layout_of(arrays: tuple[Any, ...], *others: Array | None, causal: bool = False, window: int = 0) -> tuple[Any, int]:
    """Return the struct for the arrays of a call, and for g and the new keys and values if there are any."""
    others += (None,) * (3 - len(others))
    described = [None if x is None else (x.shape, x.strides) for x in (*arrays[:3], *others, *arrays[3:])]
    before, after = (window - 1, window - 1) if window else (_FAR, _FAR)
    return _layout((before, 0 if causal else after), arrays[0].itemsize, *described)


@functools.lru_cache(maxsize=4096)
def _layout(reach: tuple[int, int], itemsize: int, *arrays: Any) -> tuple[Any, int]:
    """Return the struct, and the features for which the kernel is compiled, given shapes and strides in bytes."""
    (_, heads, queries, features), (_, shared, keys, _), (*_, width) = (shape for shape, _ in arrays[:3])
    table = np.zeros(1, _LAYOUT)
    table["sizes"] = heads, shared, queries, keys, features, width, *reach
    for name, array in zip((*_WITH_ROWS, *_FOUR_AXES), arrays, strict=True):
        if array is not None:
            step = itemsize if name in (*_WITH_ROWS, "bias") else 1
            table[name] = four_strides(array, step)[: table[name].shape[1]]
    table.flags.writeable = False
    return table, max(32, 1 << (max(features, width, 1) - 1).bit_length())


def four_strides(array: tuple[tuple[int, ...], tuple[int, ...]], step: int) -> list[int]:
    """Return strides in steps of bytes, given shape and strides; zero for axes along which the array is broadcast."""
    strides = [0 if size == 1 else stride // step for size, stride in zip(*array, strict=True)]
    return [0] * (4 - len(strides)) + strides


def with_contiguous_rows(x: Array) -> Array:
    """Return x, or a copy whose last axis is contiguous."""
    return x if x.strides[-1] == x.itemsize or x.shape[-1] == 1 else contiguous(x)


def empty_heads(like: Array, shape: Any) -> Array:
    """Allocate (batch, heads, length, features), so that heads are merged without a copy."""
    batch, heads, length, features = shape
    return array_namespace(like).permute_dims(empty(like, (batch, length, heads, features)), (0, 2, 1, 3))


_TOLERANCE = 2e-2  # of a definition by products in TF32
_TILES = "attention", "cupy", _tiles_forward, _tiles_vjp, FLOATS[:3], _tiles_why_not, "", _TOLERANCE
KERNELS = [
    Kernel("cupy.attention", "attention", "cupy", forward, vjp, FLOATS, why_not, "", _TOLERANCE),
    Kernel("cupy.attention_in_tiles", *_TILES),
]
