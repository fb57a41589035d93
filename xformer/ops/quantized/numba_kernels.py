"""Compiled products of few rows with weights in 8 or 16 bits, which are converted to float32 in registers.

Reading the weights takes most of the time of such a product, and 8 bits are a quarter of float32. The loops are plain,
because LLVM vectorizes sums of products. It does not turn products of int8 into the dot-product instructions of
processors, and with those rows would have to be rounded to int8, too.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.extending import intrinsic
from numba.types import float32, int8, int64, uint16, void

from xformer.ops._numba.compile import in_array, inline, kernel, out_array, parallel_body
from xformer.ops._numba.thread_pool import job_state, next_part, parallel_kernel
from xformer.ops._numba.vector_math import ZERO

_AHEAD = 8  # rows of values that are prefetched: the streams of two rows confuse the processor's own prefetching
_CACHE_LINE = 64  # bytes


def _types(dtype: Any) -> Any:
    return in_array(2), in_array(1), in_array(2, dtype), in_array(1), out_array(2), int64


# out = x (scales values)^T + bias, in parts of `step` columns. bfloat16 comes as uint16.
multiply_int8, _load_int8_args = parallel_kernel(*_types(int8))
multiply_bfloat16, _load_bfloat16_args = parallel_kernel(*_types(uint16))


@intrinsic  # type: ignore[untyped-decorator]
def _as_float32(typing: Any, value: Any) -> Any:
    """Convert int8, or the bits of a bfloat16, to float32."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        if value == int8:
            return builder.sitofp(values[0], ir.FloatType())
        bits = builder.shl(builder.zext(values[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return float32(value), generate


@intrinsic  # type: ignore[untyped-decorator]
def _prefetch(typing: Any, x: Any, offset: Any) -> Any:
    """Fetch the cache line of an element before it is needed; beyond the end of the array nothing happens."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        pointer, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        data = context.make_array(x)(context, builder, values[0]).data
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [pointer], ir.FunctionType(ir.VoidType(), [pointer, flag, flag, flag])
        )
        read_high_locality_data = (ir.Constant(flag, value) for value in (0, 3, 1))
        builder.call(function, [builder.bitcast(builder.gep(data, [values[1]]), pointer), *read_high_locality_data])
        return context.get_dummy_value()

    return void(x, offset), generate


@inline
def _dot(x, values):
    total = ZERO
    for k in range(x.size):
        total += _as_float32(values[k]) * x[k]
    return total


@inline
def _multiply_columns(x, scales, values, bias, out, first, last):
    """Compute columns first to last of the result, two at a time for four rows: sums fill half of the registers."""
    rows, depth = x.shape
    line = _CACHE_LINE // values.itemsize
    for n in range(first, last, 2):
        m = min(n + 1, last - 1)
        for offset in range((n + _AHEAD) * depth, (n + _AHEAD + 2) * depth, line):
            _prefetch(values, offset)
        values_n, values_m, scale_n, scale_m = values[n], values[m], scales[n], scales[m]
        bias_n, bias_m = (bias[n], bias[m]) if bias.size > 0 else (ZERO, ZERO)
        for i in range(0, rows - 3, 4):
            x0, x1, x2, x3 = x[i], x[i + 1], x[i + 2], x[i + 3]
            n0 = n1 = n2 = n3 = m0 = m1 = m2 = m3 = ZERO
            for k in range(depth):
                value_n, value_m = _as_float32(values_n[k]), _as_float32(values_m[k])
                n0 += value_n * x0[k]
                n1 += value_n * x1[k]
                n2 += value_n * x2[k]
                n3 += value_n * x3[k]
                m0 += value_m * x0[k]
                m1 += value_m * x1[k]
                m2 += value_m * x2[k]
                m3 += value_m * x3[k]
            for row, total_n, total_m in ((i, n0, m0), (i + 1, n1, m1), (i + 2, n2, m2), (i + 3, n3, m3)):
                out[row, n] = total_n * scale_n + bias_n
                out[row, m] = total_m * scale_m + bias_m
        for i in range(rows // 4 * 4, rows):
            out[i, n] = _dot(x[i], values_n) * scale_n + bias_n
            out[i, m] = _dot(x[i], values_m) * scale_m + bias_m


@inline
def _multiply_parts(state, x, scales, values, bias, out, step):
    part = next_part(state)
    while part >= 0:
        _multiply_columns(x, scales, values, bias, out, part * step, min((part + 1) * step, out.shape[1]))
        part = next_part(state)


@parallel_body
def int8_parts(job):
    """Compute parts of a product with int8 values."""
    state = job_state(job)
    x, scales, values, bias, out, step = _load_int8_args(state)
    _multiply_parts(state, x, scales, values, bias, out, step)


@parallel_body
def bfloat16_parts(job):
    """Compute parts of a product with bfloat16 values."""
    state = job_state(job)
    x, scales, values, bias, out, step = _load_bfloat16_args(state)
    _multiply_parts(state, x, scales, values, bias, out, step)


@inline
def _dequantize(scales, values, out):
    for n in range(values.shape[0]):
        row, target, scale = values[n], out[n], scales[n]
        for k in range(row.size):
            target[k] = _as_float32(row[k]) * scale


@kernel(in_array(1), in_array(2, int8), out_array(2))
def dequantize_int8(scales, values, out):
    """Compute scales values."""
    _dequantize(scales, values, out)


@kernel(in_array(1), in_array(2, uint16), out_array(2))
def dequantize_bfloat16(scales, values, out):
    """Compute scales values."""
    _dequantize(scales, values, out)
