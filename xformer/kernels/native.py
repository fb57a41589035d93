"""Kernels for NumPy arrays, by the native library.

Such a kernel gets plain arrays. It may allocate by `np.empty`, make views, and call `native.call`, `native.contiguous`
and `native.zeros`, but no other function that computes: `jit` records these calls, and repeats them with other memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from xformer import native
from xformer.backends import array_namespace, dtype_name
from xformer.ops.activations import CUBIC, QUICK, SCALE
from xformer.ops.blocks import ROUNDED, num_columns
from xformer.ops.decoding import GREEDY, kernel_settings
from xformer.ops.linear import affine_functions
from xformer.ops.operation import Kernel
from xformer.ops.optimizers import Settings, slots, updated, writable
from xformer.ops.weights import GROUP, QUANTIZED_DTYPES, table_rows


def native_kernel(
    operation: str, forward: Callable[..., Any], vjp: Callable[..., Any] | None, **options: Any
) -> Kernel:
    """Return a kernel for float32 arrays; the options are fields of `Kernel`."""
    options = {"dtypes": ("float32",), "disabled_by": "no-native", "is_recordable": True, **options}
    return Kernel(f"native.{operation}", operation, "numpy", forward, vjp, needs_plain_arrays=True, **options)


def rows_of(x: Any) -> Any:
    """Return an array (..., features) as a contiguous matrix (rows, features)."""
    x = x if x.flags.c_contiguous else native.contiguous(x)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


# --- activations ------------------------------------------------------------------------------------------------------
# An exponential and a polynomial give GELU and its derivative. With a = |x| and Phi(-a) the tail of the normal
# distribution, gelu(x) = max(x, 0) - a Phi(-a). The tail is exp(-a^2 / 2) times a polynomial in t = 1 / (1 + p a)
# (Hastings, 1955; Abramowitz and Stegun, 7.1.26), fitted to the relative precision of float32.

# Fitted for the least relative error over 0 <= a <= 14, which is 9.4e-8; beyond, the tail is zero in float32.
_P = 0.305
_COEFFICIENTS = np.asarray(
    [
        0.121639735328, 0.1224667746, 0.103421139712, 0.121020745167,
        -0.037975001979, 0.185714847352, -0.152987076117, 0.03669888286,
    ],
    np.float32,
)  # fmt: skip


def _gelu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype) if save else None
    native.call("gelu", (x, _COEFFICIENTS, y, slope), n0=_P)
    return y, slope


def _logistic_unit_forward(x: Any, *, save: bool, scale: float, cubic: float) -> tuple[Any, Any]:
    y, slope = np.empty(x.shape, x.dtype), np.empty(x.shape, x.dtype) if save else None
    native.call("logistic_unit", (x, y, slope), n0=scale, n1=cubic)
    return y, slope


def _activation_vjp(g: Any, slope: Any, needs: Any) -> tuple[Any, ...]:
    """Multiply the slope by g, in place."""
    native.call("multiply", (slope, g, slope))
    return (slope,)


def _relu_forward(x: Any, *, save: bool) -> tuple[Any, Any]:
    y = np.empty(x.shape, x.dtype)
    native.call("relu", (x, y))
    return y, y


def _relu_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    dx = np.empty(g.shape, g.dtype)
    native.call("relu_vjp", (g, y, dx))
    return (dx,)


# --- adam -------------------------------------------------------------------------------------------------------------


def _adam_why_not(grad_scale: Any, *arrays: Any, **options: Any) -> str | None:
    """Return why the arrays cannot be updated in place, element by element, or None."""
    for parameter, _, exp_avg, exp_avg_sq in slots(arrays):
        p, m, v = parameter.flags, exp_avg.flags, exp_avg_sq.flags
        if not (p.writeable and m.writeable and v.writeable):
            return "an array is read-only"
        if not (p.c_contiguous and m.c_contiguous and v.c_contiguous) and not (
            p.f_contiguous and m.f_contiguous and v.f_contiguous
        ):
            return "arrays are not contiguous, or differ in memory order"
    return None


def _adam(
    grad_scale: Any, *arrays: Any, settings: Settings, weight_decay: Sequence[float], donate: bool, save: bool
) -> tuple[Any, Any]:
    """Update each parameter; arrays in Fortran order are transposed, as elements are independent of each other."""
    arrays, values = tuple(writable(arrays, donate)), (*settings, 1.0 if grad_scale is None else grad_scale)
    is_program = np.ndarray in map(type, values)  # which has another value in the next run
    numbers = np.empty(len(values)) if is_program else np.asarray(values, np.float64)
    for index, number in enumerate(values if is_program else ()):
        if isinstance(number, np.ndarray):
            native.call("copy", (number, numbers[index, ...]))
        else:
            native.call("fill", (numbers[index, ...],), n0=float(number))
    for (p, g, m, v), rate in zip(slots(arrays), weight_decay, strict=True):
        if not p.flags.c_contiguous:
            p, g, m, v = p.T, g.T, m.T, v.T
        native.call("adam", (p, g, m, v, numbers), n0=rate)
    return updated(arrays), None


# --- attention --------------------------------------------------------------------------------------------------------
# The scores of a block of queries never leave the cache (Dao et al., 2022). Each sum over keys is one chain in their
# order, relative to the largest score of all, and the derivative recomputes the weights from this score and the sum.
# Masks and biases are broadcast, and grouped heads share keys, without copies.

_SWAP_LENGTH_AND_HEADS = (0, 2, 1, 3)  # (batch, length, heads, features) -> (batch, heads, length, features)


def empty_heads(shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    """Allocate (batch, heads, length, features) in the memory order (batch, length, heads, features)."""
    batch, heads, length, features = shape
    return np.empty((batch, length, heads, features), dtype).transpose(_SWAP_LENGTH_AND_HEADS)


def _attention_forward(
    *arrays: Any, causal: bool, scale: float, keep_probability: float, save: bool
) -> tuple[Any, Any]:
    query, _, value, *_ = arrays
    out = empty_heads((*query.shape[:3], value.shape[3]))
    statistics = np.empty((2, *query.shape[:3]), np.float32) if save else None
    saved = *arrays, out, statistics
    native.call("attention", saved, causal, n0=scale, n1=1.0 / keep_probability)
    return out, saved


def _attention_vjp(
    g: Any, residuals: Any, needs: Any, *, causal: bool, scale: float, keep_probability: float
) -> tuple[Any, ...]:
    query, key, value = residuals[:3]
    dquery, dkey, dvalue = (empty_heads(x.shape) for x in (query, key, value))
    dbias = native.zeros((*query.shape[:3], key.shape[2]), np.float32) if needs[4] else None
    arrays = (*residuals, g, dquery, dkey, dvalue, dbias)
    native.call("attention_vjp", arrays, causal, n0=scale, n1=1.0 / keep_probability)
    return dquery, dkey, dvalue, None, dbias, None


# --- blocks -----------------------------------------------------------------------------------------------------------


def _blocks_why_not(blocks: Any, **options: Any) -> str | None:
    if blocks.dtype != np.uint8:
        return f"blocks of dtype {blocks.dtype} (compiled for uint8)"
    if blocks.shape[-1] == 84:
        return "the blocks are Q2_K"
    return None if blocks.flags.c_contiguous else "the blocks are not contiguous"


def _second_why_not(x: Any, blocks: Any, bias: Any, **options: Any) -> str | None:
    return _blocks_why_not(blocks)


def _dequantize(blocks: Any, *, save: bool) -> tuple[Any, Any]:
    rows, count, num_bytes = blocks.shape
    values = np.empty((rows, num_columns(blocks)), np.float32)
    by_block = rows * count, values.shape[1] // max(1, count)
    if values.size:
        native.call("dequantize", (blocks.reshape(by_block[0], num_bytes), values.reshape(by_block)))
    return values, None


def _block_linear(x: Any, blocks: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    out = np.empty((x.shape[0], blocks.shape[0]), np.float32)
    native.call("matmul_blocks", (x, blocks, out, bias))
    return out, blocks


def _block_linear_vjp(g: Any, blocks: Any, needs: Any) -> tuple[Any, ...]:
    columns, g = num_columns(blocks), rows_of(g)
    dx = np.empty((len(g), columns), np.float32) if needs[0] else None
    for rows in table_rows(len(blocks), columns) if needs[0] else ():
        native.call("matmul", (g[:, rows], _dequantize(blocks[rows], save=False)[0], dx), rows.start > 0)
    return dx, None, _sum_of_rows(g) if needs[2] else None


def _sum_of_rows(rows: Any) -> Any:
    out = np.empty(rows.shape[1], np.float32)
    native.call("sum_rows", (rows, out))
    return out


def _rounded_block_linear(x: Any, strips: Any, bias: Any, *, columns: int, save: bool) -> tuple[Any, Any]:
    (rows, depth), groups = x.shape, x.shape[1] // ROUNDED
    numbers, out = np.empty((rows, depth), np.int8), np.empty((rows, columns), np.float32)
    scales, sums = np.empty((rows, groups), np.float32), np.empty((rows, 2 * groups), np.float32)
    native.call("round_groups", (x, numbers, scales, sums))
    native.call("matmul_strips", (numbers, scales, sums, strips, out, bias))
    return out, None


# --- cross_entropy ----------------------------------------------------------------------------------------------------


def _cross_entropy_forward(
    logits: Any, labels: Any, *, pad_id: int, label_smoothing: float, z_loss: float, save: bool
) -> tuple[Any, Any]:
    """Save the logits: computing their exponentials again takes less time than storing them."""
    rows, ids = rows_of(logits), native.contiguous(labels, np.int64)
    losses, statistics = np.empty(labels.shape, logits.dtype), np.empty((2, len(rows)), logits.dtype)
    native.call("cross_entropy", (rows, ids, losses, statistics), pad_id, n0=label_smoothing, n1=z_loss)
    return losses, (rows, ids, statistics, logits.shape)


def _cross_entropy_vjp(
    g: Any, residuals: Any, needs: Any, *, pad_id: int, label_smoothing: float, z_loss: float
) -> tuple[Any, ...]:
    rows, ids, statistics, shape = residuals
    dlogits = np.empty(rows.shape, rows.dtype)
    arrays = rows, ids, g, statistics, dlogits
    native.call("cross_entropy_vjp", arrays, pad_id, n0=label_smoothing, n1=z_loss)
    return dlogits.reshape(shape), None


# --- decoding ---------------------------------------------------------------------------------------------------------

_MAX_K = 256  # values are inserted one by one; more are sorted faster


def _logsumexp(x: Any, *, save: bool) -> tuple[tuple[Any, Any], Any]:
    """Take the cross-entropy of the largest element: the logarithm of the sum relative to it, as in training."""
    rows, shape = rows_of(x), (*x.shape[:-1], 1)
    (top, label), losses = _top_k(rows, k=1, save=False)[0], np.empty(shape, x.dtype)
    statistics = np.empty((2, len(rows)), x.dtype)
    native.call("cross_entropy", (rows, label.reshape(-1), losses, statistics), -1, n0=0.0, n1=0.0)
    return (top.reshape(shape), losses), None


def choose_into(logits: Any, *arrays: Any) -> None:
    """Record the choice of tokens in a trace; for the arrays see native/src/rows.cpp."""

    def run(logits: Any, *arrays: Any) -> None:
        native.call("choose", (native.contiguous(logits), *arrays))

    array_namespace(logits).call_kernel(run, (logits, *arrays), is_native=True)


def read_later(array: Any) -> Callable[[], Any]:
    """Return a function that returns an array of the host."""
    return array.copy


def _choose(logits: Any, uniforms: Any, *, save: bool, **settings: Any) -> tuple[Any, Any]:
    if uniforms is None:
        settings, uniforms = GREEDY, native.zeros((len(logits),), np.float64)
    numbers = native.contiguous(uniforms, np.float64)
    tokens, found = np.empty(numbers.shape, np.int64), np.empty((*numbers.shape, 2))
    arrays = native.contiguous(logits), tokens, None, None, numbers, np.asarray(kernel_settings(**settings)), found
    native.call("choose", arrays)
    return native.contiguous(found, logits.dtype), None


def _top_k(x: Any, *, k: int, save: bool) -> tuple[Any, Any]:
    rows, shape = rows_of(x), (*x.shape[:-1], k)
    values, indices = np.empty((len(rows), k), x.dtype), np.empty((len(rows), k), np.int64)
    native.call("top_k", (rows, values, indices))
    return (values.reshape(shape), indices.reshape(shape)), None


def _why_not_top_k(x: Any, *, k: int, save: bool) -> str | None:
    return None if 1 <= k <= min(_MAX_K, x.shape[-1]) else f"k is {k}; expected 1 to {_MAX_K}"


# --- dropout ----------------------------------------------------------------------------------------------------------


def _dropout_forward(x: Any, mask: Any, *, keep_probability: float, save: bool) -> tuple[Any, Any]:
    y = np.empty(x.shape, x.dtype)
    native.call("dropout", (x, mask, y), n0=1.0 / keep_probability)
    return y, mask


def _dropout_vjp(g: Any, mask: Any, needs: Any, *, keep_probability: float) -> tuple[Any, ...]:
    return _dropout_forward(g, mask, keep_probability=keep_probability, save=False)[0], None


# --- embedding --------------------------------------------------------------------------------------------------------


def _embedding_forward(weight: Any, ids: Any, *, scale: float, save: bool) -> tuple[Any, Any]:
    y, flat = np.empty((*ids.shape, weight.shape[1]), weight.dtype), native.contiguous(ids, np.int64).reshape(-1)
    native.call("take", (weight, flat, y.reshape(flat.size, weight.shape[1])), 0)
    if scale != 1.0:
        factor = np.empty((), y.dtype)
        native.call("fill", (factor,), n0=scale)
        native.call("multiply", (y, factor, y))
    return y, (flat, weight.shape)


def _embedding_vjp(g: Any, residuals: Any, needs: Any, *, scale: float) -> tuple[Any, ...]:
    ids, shape = residuals
    dweight = native.zeros(shape, g.dtype)
    native.call("add_rows", (rows_of(g), ids, dweight), n0=scale)
    return dweight, None


# --- linear -----------------------------------------------------------------------------------------------------------


def _matmul(x: Any, w: Any, bias: Any = None, relu: bool = False) -> Any:
    """Compute x @ w + bias for matrices in any memory layout, or its positive part."""
    out = np.empty((x.shape[0], w.shape[1]), np.float32)
    native.call("matmul", (x, w, out, bias))
    if relu:
        native.call("relu", (out, out))
    return out


def _transposed_product(g_rows: Any, weight: Any, addend: Any) -> Any:
    if addend is None:
        return _matmul(g_rows, weight.T)
    native.call("matmul", (g_rows, weight.T, addend), True)
    return addend


def _parameter_cotangents(rows: Any, g_rows: Any, weight: Any, needs: Any) -> tuple[Any, Any]:
    """Return the cotangents of weight and bias that are needed, the first in the weight's memory order."""
    dweight = dbias = None
    if needs[0]:
        dweight = _matmul(g_rows.T, rows).T if weight.flags.f_contiguous else _matmul(rows.T, g_rows)
    if needs[1]:
        dbias = _sum_of_rows(g_rows)
    return dweight, dbias


_AFFINE = affine_functions(
    _matmul,
    _transposed_product,
    _parameter_cotangents,
    _relu_vjp,
    rows_of=lambda x, shape: x if x.ndim == 2 else (x if x.flags.c_contiguous else native.contiguous(x)).reshape(shape),
    cotangent_rows_of=lambda g, shape: (g if g.flags.c_contiguous else native.contiguous(g)).reshape(shape),
)


# --- norms ------------------------------------------------------------------------------------------------------------

_BLOCK_ELEMENTS, _MAX_BLOCKS = 32_768, 16  # blocks of rows, whose sums for the derivative are added in order


def _norm(x: Any, weight: Any, bias: Any = None, *, epsilon: float, save: bool, centered: bool) -> tuple[Any, Any]:
    rows = rows_of(x)
    y, statistics = np.empty(rows.shape, x.dtype), np.empty((2, len(rows)), x.dtype)
    native.call("norm", (rows, weight, bias, y, statistics), centered, n0=epsilon)
    return y.reshape(x.shape), (rows, weight, statistics)


def _norm_vjp(g: Any, residuals: Any, needs: Any, *, epsilon: float, centered: bool) -> tuple[Any, ...]:
    rows, weight, statistics = residuals
    blocks = max(1, min(len(rows), math.ceil(rows.size / _BLOCK_ELEMENTS), _MAX_BLOCKS))
    dx, sums = np.empty(rows.shape, rows.dtype), np.empty((blocks, 2, rows.shape[1]), rows.dtype)
    native.call("norm_vjp", (rows_of(g), rows, weight, statistics, dx, sums), centered)
    totals = sums[0]
    if blocks > 1:
        totals = np.empty(sums.shape[1:], rows.dtype)
        native.call("sum", (sums, totals), 1)
    return (dx.reshape(g.shape), *totals)[: len(needs)]


# --- packed -----------------------------------------------------------------------------------------------------------


def _packed_why_not(x: Any, panels: Any, scales: Any, bias: Any, *, columns: int, **options: Any) -> str | None:
    if panels.dtype.name not in ("float32", "int8", "bfloat16"):
        return f"panels of dtype {panels.dtype} (compiled for float32, int8 and bfloat16)"
    return None if panels.flags.c_contiguous else "the panels are not contiguous"


def _packed_forward(x: Any, panels: Any, scales: Any, bias: Any, *, columns: int, save: bool) -> tuple[Any, Any]:
    out = np.empty((x.shape[0], columns), np.float32)
    if panels.dtype.name == "int8":
        _multiply_rounded(x, panels, scales, bias, out)
    else:
        panels = panels if panels.dtype.name != "bfloat16" else panels.view(np.uint16)
        native.call("matmul_packed", (x, panels, out, bias, scales))
    return out, None


def _multiply_rounded(x: Any, panels: Any, scales: Any, bias: Any, out: Any) -> None:
    """Multiply rows that are rounded to int8, with dot products of integers if the processor has them."""
    groups = -(-x.shape[1] // GROUP)
    rounded = np.empty((x.shape[0], groups * GROUP), np.uint8)
    scales_of_x = np.empty((x.shape[0], groups), np.float32)
    native.call("round_rows", (x, rounded, scales_of_x))
    native.call("matmul_rounded", (rounded, scales_of_x, panels, out, bias, scales))


# --- quantized --------------------------------------------------------------------------------------------------------


def _quantized_why_not(x: Any, scales: Any, values: Any, bias: Any, **options: Any) -> str | None:
    if dtype_name(values.dtype) not in QUANTIZED_DTYPES:
        return f"dtype {values.dtype} (compiled for int8 and bfloat16)"
    return None


def _quantized_forward(x: Any, scales: Any, values: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    out = np.empty((x.shape[0], values.shape[0]), np.float32)
    table = values if values.dtype == np.int8 else values.view(np.uint16)
    native.call("matmul", (x, table.T, out, bias, scales))
    return out, (scales, table)


def _quantized_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    (scales, table), g = residuals, rows_of(g)
    dx = np.empty((len(g), table.shape[1]), np.float32) if needs[0] else None
    if needs[0]:
        scaled = np.empty_like(g)
        native.call("multiply", (g, scales, scaled))
        native.call("matmul", (scaled, table, dx))
    return dx, None, None, _sum_of_rows(g) if needs[3] else None


# --- rotate -----------------------------------------------------------------------------------------------------------


def _rotate(x: Any, cosine: Any, sine: Any, *, is_inverse: bool) -> Any:
    y, shape = np.empty(x.shape, x.dtype), (math.prod(x.shape[:-2]), *x.shape[-2:])
    x = x if x.flags.c_contiguous else native.contiguous(x)
    native.call("rotate", (x.reshape(shape), cosine, sine, y.reshape(shape)), is_inverse)
    return y


def _rotate_forward(x: Any, cosine: Any, sine: Any, *, save: bool) -> tuple[Any, Any]:
    return _rotate(x, cosine, sine, is_inverse=False), (cosine, sine)


def _rotate_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    return _rotate(g, *residuals, is_inverse=True), None, None


# --- softmax ----------------------------------------------------------------------------------------------------------


def _softmax_forward(x: Any, mask: Any, *, save: bool) -> tuple[Any, Any]:
    y = np.empty(x.shape, x.dtype)
    mask = None if mask is None else np.broadcast_to(mask, x.shape)
    native.call("softmax", (x if x.flags.c_contiguous else native.contiguous(x), mask, y))
    return y, y


def _softmax_vjp(g: Any, y: Any, needs: Any) -> tuple[Any, ...]:
    dx = np.empty(g.shape, g.dtype)
    native.call("softmax_vjp", (g, y, dx))
    return dx, None


# --- squared_norm -----------------------------------------------------------------------------------------------------

_BLOCK = 16_384  # elements, as in native/src/rows.cpp
_ARRAYS = 11  # of one call
_TWO = np.asarray(2.0, np.float32)


def _squared_norm_forward(*arrays: Any, save: bool) -> tuple[Any, Any]:
    """Sum blocks in float32, and their sums in float64."""
    packed = [x.T if x.flags.f_contiguous else x for x in arrays]  # the order of the memory, which needs no copy
    counts = [-(-x.size // _BLOCK) for x in packed]
    sums, total = np.empty(sum(counts), np.float64), np.empty((), np.float64)
    start = 0
    for i in range(0, len(packed), _ARRAYS):
        end = start + sum(counts[i : i + _ARRAYS])
        native.call("sums_of_squares", (sums[start:end], *packed[i : i + _ARRAYS]))
        start = end
    native.call("sum", (sums, total), 1)
    return native.contiguous(total, np.float32), arrays


def _squared_norm_vjp(g: Any, arrays: Any, needs: Any) -> tuple[Any, ...]:
    scale, cotangents = np.empty((), np.float32), tuple(np.empty_like(x) for x in arrays)
    native.call("multiply", (g, _TWO, scale))
    for x, cotangent in zip(arrays, cotangents, strict=True):
        native.call("multiply", (x, scale, cotangent))
    return cotangents


# --- registration -----------------------------------------------------------------------------------------------------

KERNELS = [
    native_kernel("gelu", _gelu_forward, _activation_vjp),
    native_kernel("gelu_tanh", partial(_logistic_unit_forward, scale=SCALE, cubic=CUBIC), _activation_vjp),
    native_kernel("silu", partial(_logistic_unit_forward, scale=1.0, cubic=0.0), _activation_vjp),
    native_kernel("quick_gelu", partial(_logistic_unit_forward, scale=QUICK, cubic=0.0), _activation_vjp),
    native_kernel("relu", _relu_forward, _relu_vjp),
    native_kernel("adam", _adam, None, why_not=_adam_why_not, records_options=True),
    native_kernel("attention", _attention_forward, _attention_vjp),
    native_kernel("dequantize", _dequantize, None, dtypes=None, why_not=_blocks_why_not),
    native_kernel("block_linear", _block_linear, _block_linear_vjp, why_not=_second_why_not),
    native_kernel("rounded_block_linear", _rounded_block_linear, None, why_not=_second_why_not),
    native_kernel("cross_entropy", _cross_entropy_forward, _cross_entropy_vjp),
    native_kernel("logsumexp", _logsumexp, None),
    # Of a number at the border of two tokens, sums that round differently draw either.
    native_kernel("choose", _choose, None, tolerance=1e-2),
    native_kernel("top_k", _top_k, None, why_not=_why_not_top_k),
    native_kernel("dropout", _dropout_forward, _dropout_vjp),
    native_kernel("embedding", _embedding_forward, _embedding_vjp),
    native_kernel("linear", *_AFFINE),
    native_kernel("project_heads", *_AFFINE),
    *[
        native_kernel(name, partial(_norm, centered=centered), partial(_norm_vjp, centered=centered))
        for name, centered in (("layer_norm", True), ("rms_norm", False))
    ],
    native_kernel("packed_linear", _packed_forward, None, why_not=_packed_why_not),
    native_kernel("quantized_linear", _quantized_forward, _quantized_vjp, why_not=_quantized_why_not),
    native_kernel("rotate", _rotate_forward, _rotate_vjp),
    native_kernel("softmax", _softmax_forward, _softmax_vjp),
    native_kernel("squared_norm", _squared_norm_forward, _squared_norm_vjp),
]
