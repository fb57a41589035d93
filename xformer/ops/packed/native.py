"""Linear maps with weights in panels by the native library."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel
from xformer.ops._native import why_not as default_why_not
from xformer.ops.packed.definition import GROUP

# Rows from which BLAS is faster although w is copied.
_MIN_BLAS_ROWS = 256


def _why_not(x: Any, panels: Any, scales: Any, bias: Any, *, columns: int, **options: Any) -> str | None:
    if panels.dtype.name not in ("float32", "int8", "bfloat16"):
        return f"panels of dtype {panels.dtype} (compiled for float32, int8 and bfloat16)"
    if not panels.flags.c_contiguous:
        return "the panels are not contiguous"
    return default_why_not(x, panels, scales, bias)


def _forward(x: Any, panels: Any, scales: Any, bias: Any, *, columns: int, save: bool) -> tuple[Any, Any]:
    out = np.empty((x.shape[0], columns), np.float32)
    bias, scales = (None if array is None else native.contiguous(array) for array in (bias, scales))
    if panels.dtype.name == "int8":
        _multiply_rounded(x, panels, scales, bias, out)
    elif scales is None and x.shape[0] >= _MIN_BLAS_ROWS:
        matrix = native.contiguous(panels.transpose(1, 0, 2)).reshape(x.shape[1], math.prod(panels.shape[::2]))
        native.call("matmul", (x, matrix[:, :columns], out, bias))
    else:
        panels = panels if panels.dtype.name != "bfloat16" else panels.view(np.uint16)
        native.call("matmul_packed", (x, panels, out, bias, scales))
    return out, None


def _multiply_rounded(x: Any, panels: Any, scales: Any, bias: Any, out: Any) -> None:
    """Multiply rows that are rounded to int8, with dot products of integers if the processor has them."""
    groups = -(-x.shape[1] // GROUP)
    rounded = np.empty((x.shape[0], groups * GROUP), np.uint8)
    scales_of_x = np.empty((x.shape[0], groups), np.float32)
    native.call("round_rows", (native.contiguous(x), rounded, scales_of_x))
    native.call("matmul_rounded", (rounded, scales_of_x, panels, out, bias, scales))


KERNELS = [native_kernel("packed_linear", _forward, None, why_not=_why_not)]
