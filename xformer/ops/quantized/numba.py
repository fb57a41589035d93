"""Linear maps with weights in 8 or 16 bits on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends import dtype_name
from xformer.backends.recording import contiguous, empty
from xformer.ops._numba.compile import EMPTY_1D, compiled_kernel, flatten, why_not
from xformer.ops._numba.thread_pool import run_parallel, threads_for
from xformer.ops.linear.definition import linear
from xformer.ops.quantized import numba_kernels as kernels
from xformer.ops.quantized.definition import QUANTIZED_DTYPES

_MAX_ROWS = 32  # above, the product is compute-bound, and products in float32 are faster
_BLOCK = 1 << 22  # elements of a weight that are converted to float32 at a time


def _why_not(x: Any, scales: Any, values: Any, bias: Any, **options: Any) -> str | None:
    if dtype_name(values.dtype) not in QUANTIZED_DTYPES:
        return f"dtype {values.dtype} (compiled for int8 and bfloat16)"
    if not (values.flags.c_contiguous and scales.flags.c_contiguous):
        return "the weight is not contiguous"
    return why_not(x, scales, values, bias)


def _forward(x: Any, scales: Any, values: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    (rows, depth), columns, dtype = x.shape, values.shape[0], dtype_name(values.dtype)
    multiply, body = getattr(kernels, f"multiply_{dtype}"), getattr(kernels, f"{dtype}_parts")
    values = values if dtype == "int8" else values.view(np.uint16)
    out = empty((rows, columns), np.float32)
    if rows > _MAX_ROWS:
        dequantize = getattr(kernels, f"dequantize_{dtype}")
        step = max(1, _BLOCK // max(1, depth))
        for start in range(0, columns, step):
            block = slice(start, start + step)
            weight = empty(values[block].shape, np.float32)
            dequantize(scales[block], values[block], weight)
            out[:, block] = linear(x, weight.T, None if bias is None else bias[block])
        return out, None
    bias = EMPTY_1D if bias is None else flatten(bias)
    threads = threads_for(rows * depth * columns)
    step = -(-columns // (2 * threads) // 2) * 2 if threads > 1 else columns
    num_parts = -(-columns // max(1, step))
    run_parallel(multiply, body, num_parts, threads, contiguous(x), scales, values, bias, out, step)
    return out, None


KERNELS = [
    compiled_kernel("quantized_linear", _forward, None, why_not=_why_not),
]
