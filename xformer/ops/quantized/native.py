"""Linear maps with weights in 8 or 16 bits by the native library."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer import native
from xformer.backends import dtype_name
from xformer.ops._native import native_kernel
from xformer.ops._native import why_not as default_why_not
from xformer.ops.quantized.definition import QUANTIZED_DTYPES


def _why_not(x: Any, scales: Any, values: Any, bias: Any, **options: Any) -> str | None:
    if dtype_name(values.dtype) not in QUANTIZED_DTYPES:
        return f"dtype {values.dtype} (compiled for int8 and bfloat16)"
    return default_why_not(x, scales, values, bias)


def _forward(x: Any, scales: Any, values: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    out = np.empty((x.shape[0], values.shape[0]), np.float32)
    weight = values.T if values.dtype == np.int8 else values.view(np.uint16).T
    bias = None if bias is None else native.contiguous(bias)
    native.call("matmul", (x, weight, out, bias, native.contiguous(scales)))
    return out, None


KERNELS = [native_kernel("quantized_linear", _forward, None, why_not=_why_not)]
