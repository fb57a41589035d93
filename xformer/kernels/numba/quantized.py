"""Linear maps with weights in 8 or 16 bits on NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer.backends import dtype_name
from xformer.backends.recording import contiguous, empty
from xformer.kernels.numba import arrays as numba_arrays
from xformer.kernels.numba.arrays import EMPTY_1D, flatten, import_kernels
from xformer.kernels.numba.thread_pool import run_parallel, threads_for
from xformer.kernels.registry import Kernel, register
from xformer.ops.linear import linear
from xformer.ops.quantized import QUANTIZED_DTYPES

_MAX_ROWS = 32  # with more, computing takes the time and not reading weights: products in float32 are faster
_BLOCK = 1 << 22  # elements of a weight that are converted to float32 at a time


def _supports(arrays: tuple[Any, ...], static: dict[str, Any]) -> str | None:
    x, scales, values, bias = arrays
    if dtype_name(values.dtype) not in QUANTIZED_DTYPES:
        return f"dtype {values.dtype} (compiled for int8 and bfloat16)"
    if not (values.flags.c_contiguous and scales.flags.c_contiguous):
        return "the weight is not contiguous"
    return numba_arrays.supports((x, scales, bias), static)


def _forward(x: Any, scales: Any, values: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    (rows, depth), columns, dtype = x.shape, values.shape[0], dtype_name(values.dtype)
    kernels = import_kernels("quantized_kernels")
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


register(
    Kernel(
        "numba.quantized_linear",
        "quantized_linear",
        "numpy",
        _supports,
        _forward,
        None,
        priority=20,
        disabled_by="no-jit",
        is_recordable=True,
    )
)
