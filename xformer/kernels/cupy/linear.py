"""Linear maps on CuPy, as products of 2D matrices: CuPy upcasts or rejects stacks of float16 and bfloat16 matrices.

cuBLASLt adds a bias, applies ReLU and sums the gradient of a bias if it supports the product; otherwise each of these
is a pass over memory.
"""

from __future__ import annotations

from typing import Any

from xformer.kernels.cupy import cublaslt, launch
from xformer.kernels.cupy.cublas import batched_product
from xformer.kernels.cupy.elementwise import relu_forward, relu_vjp
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, grid_for_elements, why_not
from xformer.kernels.cupy.rows import column_sums
from xformer.ops.linear import as_rows, linear_functions, merge_heads
from xformer.ops.operation import Kernel


def _affine(rows: Any, weight: Any, bias: Any, *, relu: bool = False) -> Any:
    y = None if bias is None else cublaslt.affine(rows, weight, bias, relu=relu)
    if y is not None:
        return y
    y = batched_product(rows, weight)
    if bias is not None:
        launch.launch("columns.add_bias", dtype_names(y), *grid_for_elements(y), y, contiguous(bias), y.size, len(bias))
    return relu_forward(y, save=False)[0] if relu else y


def _parameter_cotangents(rows: Any, g_rows: Any, weight: Any, needs: Any) -> tuple[Any, Any]:
    """Return the cotangents of weight and bias that are needed, the first in the weight's memory order.

    The tied output layer needs this order.
    """
    transposed = weight.flags.f_contiguous and not weight.flags.c_contiguous
    if all(needs) and not transposed:
        both = cublaslt.gradients(rows, g_rows)
        if both is not None:
            return both
    dweight = dbias = None
    if needs[0]:
        dweight = batched_product(g_rows.T, rows).T if transposed else batched_product(rows.T, g_rows)
    if needs[1]:
        dbias = column_sums(g_rows, weight.dtype)
    return dweight, dbias


_FUNCTIONS = linear_functions(
    _affine,
    lambda rows, weight, addend: batched_product(rows, weight.T, addend=addend),
    _parameter_cotangents,
    lambda g: contiguous(as_rows(merge_heads(g))),
)


def _relu_forward(x: Any, weight: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    y = _affine(as_rows(x), weight, bias, relu=True).reshape(*x.shape[:-1], weight.shape[1])
    return y, (x, weight, y)


def _relu_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    x, weight, y = residuals
    return _FUNCTIONS["linear"][1](relu_vjp(g, y, needs)[0], (x, weight), needs)


_FUNCTIONS["linear_relu"] = _relu_forward, _relu_vjp
KERNELS = [
    Kernel(f"cupy.{name}", name, "cupy", *pair, dtypes=FLOATS, why_not=why_not) for name, pair in _FUNCTIONS.items()
]
