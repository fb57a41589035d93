"""Quantized blocks, and linear maps with them, by the native library."""

from __future__ import annotations

from typing import Any

import numpy as np

from xformer import native
from xformer.ops._native import native_kernel
from xformer.ops._native import why_not as default_why_not
from xformer.ops.blocks.definition import num_columns


def _why_not(blocks: Any, **options: Any) -> str | None:
    if blocks.dtype != np.uint8:
        return f"blocks of dtype {blocks.dtype} (compiled for uint8)"
    return None if blocks.flags.c_contiguous else "the blocks are not contiguous"


def _dequantize(blocks: Any, *, save: bool) -> tuple[Any, Any]:
    rows, count, num_bytes = blocks.shape
    values = np.empty((rows, num_columns(blocks)), np.float32)
    by_block = rows * count, values.shape[1] // max(1, count)
    if values.size:
        native.call("dequantize", (blocks.reshape(by_block[0], num_bytes), values.reshape(by_block)))
    return values, None


def _linear_why_not(x: Any, blocks: Any, bias: Any, **options: Any) -> str | None:
    return _why_not(blocks) or default_why_not(x, bias)


def _linear(x: Any, blocks: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    out = np.empty((x.shape[0], blocks.shape[0]), np.float32)
    native.call("matmul_blocks", (x, blocks, out, None if bias is None else native.contiguous(bias)))
    return out, None


KERNELS = [
    native_kernel("dequantize", _dequantize, None, dtypes=None, why_not=_why_not),
    native_kernel("block_linear", _linear, None, why_not=_linear_why_not),
]
