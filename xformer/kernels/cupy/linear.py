"""Linear maps on CuPy, as products of 2D matrices: CuPy upcasts or rejects stacks of float16 and bfloat16 matrices.

cuBLASLt adds a bias, applies ReLU and sums the gradient of a bias if it supports the product; otherwise each of these
is a pass over memory.
"""

from __future__ import annotations

import functools
from typing import Any

from xformer.kernels.cupy import cublaslt, launch
from xformer.kernels.cupy.cublas import batched_product
from xformer.kernels.cupy.elementwise import activation_forward, activation_vjp
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, grid_for_elements, why_not
from xformer.kernels.cupy.rows import column_sums
from xformer.ops.linear import affine_functions
from xformer.ops.operation import Kernel


def _affine(rows: Any, weight: Any, bias: Any, relu: bool) -> Any:
    y = None if bias is None else cublaslt.affine(rows, weight, bias, relu=relu)
    if y is not None:
        return y
    y = batched_product(rows, weight)
    if bias is not None:
        launch.launch("columns.add_bias", dtype_names(y), *grid_for_elements(y), y, contiguous(bias), y.size, len(bias))
    return activation_forward(y, save=False, name="relu")[0] if relu else y


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


_FUNCTIONS = affine_functions(
    _affine,
    lambda rows, weight, addend: batched_product(rows, weight.T, addend=addend),
    _parameter_cotangents,
    functools.partial(activation_vjp, name="relu"),
    cotangent_rows_of=lambda g, shape: contiguous(g.reshape(shape)),
)
KERNELS = [
    Kernel(f"cupy.{name}", name, "cupy", *_FUNCTIONS, dtypes=FLOATS, why_not=why_not)
    for name in ("linear", "project_heads")
]
