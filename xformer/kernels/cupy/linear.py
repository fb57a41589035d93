"""Linear maps on CuPy, as products of 2D matrices: CuPy upcasts or rejects stacks of float16 and bfloat16 matrices.

cuBLASLt adds a bias, applies ReLU and sums the gradient of a bias if it supports the product; otherwise each of these
is a pass over memory. Products of a few rows with quantized weights read them as they are stored.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from xformer.backends import dtype_name
from xformer.kernels.cupy import calls, cublas, cublaslt, launch
from xformer.kernels.cupy.cublas import batched_product
from xformer.kernels.cupy.elementwise import activation_forward, activation_vjp, map_elements
from xformer.kernels.cupy.launch import FLOATS, contiguous, dtype_names, empty, grid_for_rows, why_not
from xformer.kernels.cupy.rows import column_sums
from xformer.native import is_reproducible
from xformer.ops.linear import affine_functions
from xformer.ops.operation import Kernel
from xformer.ops.weights import QUANTIZED_DTYPES


def _affine(rows: Any, weight: Any, bias: Any, relu: bool) -> Any:
    y = None if bias is None else cublaslt.affine(rows, weight, bias, relu=relu)
    if y is not None:
        return y
    y = batched_product(rows, weight)
    if bias is not None:
        y = map_elements("add", y, contiguous(bias), settings=(len(bias),))
    return activation_forward(y, save=False, name="relu")[0] if relu else y


def _parameter_cotangents(rows: Any, g_rows: Any, weight: Any, needs: Any) -> tuple[Any, Any]:
    """Return the cotangents of weight and bias that are needed, the first in the weight's memory order.

    The tied output layer needs this order.
    """
    transposed = weight.flags.f_contiguous and not weight.flags.c_contiguous

    def separately() -> tuple[Any, Any]:
        dweight = dbias = None
        if needs[0]:
            dweight = batched_product(g_rows.T, rows).T if transposed else batched_product(rows.T, g_rows)
        if needs[1]:
            dbias = column_sums(g_rows, weight.dtype)
        return dweight, dbias

    return cublaslt.gradients(rows, g_rows, separately) if all(needs) and not transposed else separately()


_FUNCTIONS = affine_functions(
    _affine,
    lambda rows, weight, addend: batched_product(rows, weight.T, addend=addend),
    _parameter_cotangents,
    functools.partial(activation_vjp, name="relu"),
    cotangent_rows_of=lambda g, shape: contiguous(g.reshape(shape)),
)


def _project_forward(x: Any, *maps: Any, heads: Any, save: bool) -> tuple[Any, Any]:
    """Multiply by neighboring columns of one array at once, and by two arrays alike in one batch."""
    weights, biases = maps[::2], maps[1::2]
    weight, given = _joined(weights), [each for each in biases if each is not None]
    bias, pair = _joined(given) if given else None, None if given else _pair(weights)
    is_joined = len(weights) > 1 and weight is not None and len(given) in (0, len(weights))
    is_joined = is_joined and (bias is not None or not given)
    if not is_joined and pair is None:
        return _FUNCTIONS[0](x, *maps, heads=heads, save=save)
    for arrays in (weights, given) if given else (weights,):
        calls.repeat_at_distances(arrays)
    rows, end = x.reshape((math.prod(x.shape[:2]), x.shape[2])), 0
    if is_joined or pair is None:
        products, columns = _affine(rows, weight, bias, False), []
        for each in weights:
            columns.append(products[:, end : (end := end + each.shape[1])])
    else:
        first, distance, step = pair
        columns = [*batched_product(rows, first, distance=distance)][::step]
    shapes = ((*x.shape[:2], count, y.shape[1] // count) for y, count in zip(columns, heads, strict=True))
    outputs = (y.reshape(shape).transpose((0, 2, 1, 3)) for y, shape in zip(columns, shapes, strict=True))
    return tuple(outputs), (x, weights, None)


def _project_vjp(g: Any, residuals: Any, needs: Any, *, heads: Any) -> tuple[Any, ...]:
    """Compute the cotangents of two weights alike in one batch."""
    x, weights, _ = residuals
    g_rows = [each if each is None else each.transpose((0, 2, 1, 3)) for each in g]
    is_supported = (*needs[1:],) == (True, False, True, False) and _pair(weights) is not None
    pair = _pair(g_rows) if is_supported else None
    if pair is None:
        return _FUNCTIONS[1](g, residuals, needs, heads=heads)
    dx, *_ = _FUNCTIONS[1](g, residuals, (needs[0], *[False] * 4), heads=heads)
    rows = contiguous(x).reshape((math.prod(x.shape[:2]), x.shape[2]))
    first, distance, step = pair
    products = batched_product(rows.T, first.reshape((len(rows), weights[0].shape[1])), distance=distance)
    dweight, other = [*products][::step]
    return dx, dweight, None, other, None


def _pair(arrays: Any) -> tuple[Any, int, int] | None:
    """Return the first in memory of two arrays alike, where the other one is, in elements, and their order, 1 or -1."""
    if len(arrays) != 2 or any(each is None or not each.flags.c_contiguous or not each.size for each in arrays):
        return None
    first, other = sorted(arrays, key=cublas.pointer)
    distance, rest = divmod(cublas.pointer(other) - cublas.pointer(first), first.itemsize)
    is_alike = first.shape == other.shape and first.dtype == other.dtype
    return (first, distance, 1 if first is arrays[0] else -1) if is_alike and distance and not rest else None


def _joined(arrays: Any) -> Any:
    """Return arrays that are neighboring columns of another one as one, or None."""
    base, size = arrays[0], sum(each.shape[-1] for each in arrays)
    while base.base is not None:
        base = base.base
    if base is arrays[0] or not base.flags.c_contiguous or base.shape[:-1] != arrays[0].shape[:-1]:
        return None
    place = cublas.pointer(arrays[0])
    first = (place - cublas.pointer(base)) // base.itemsize
    for each in arrays:
        is_alike = each.base is not None and (each.dtype, each.strides) == (base.dtype, base.strides)
        if not is_alike or cublas.pointer(each) != place:
            return None
        place += each.shape[-1] * each.itemsize
    return base[..., first : first + size]


# --- quantized weights ------------------------------------------------------------------------------------------------

_FEW_ROWS = 1, 4, 8, 16  # of which cuda/quantized.cu keeps sums in registers
_WARPS = 4  # per block


def _quantized_why_not(x: Any, scales: Any, values: Any, bias: Any, **options: Any) -> str | None:
    if dtype_name(values.dtype) not in QUANTIZED_DTYPES:
        return f"values of dtype {dtype_name(values.dtype)} (the kernel takes {' or '.join(QUANTIZED_DTYPES)})"
    for each in (scales, bias):
        if each is not None and each.dtype != x.dtype:
            return f"parameters of dtype {dtype_name(each.dtype)} with {dtype_name(x.dtype)} rows"
    return why_not(x) if values.flags.c_contiguous else "the values are not contiguous"


def _quantized_forward(x: Any, scales: Any, values: Any, bias: Any, *, save: bool) -> tuple[Any, Any]:
    x, scales, (columns, depth) = contiguous(x), contiguous(scales), values.shape
    most = next((count for count in _FEW_ROWS if len(x) <= count), 0)
    is_odd = depth % launch.elements_per_thread(x) or cublas.pointer(x) % 16 or cublas.pointer(values) % 16
    if not most or is_odd or dtype_name(x.dtype) == "float64" or is_reproducible():
        return _affine(x, _dequantized(scales, values).T, bias, False), (scales, values)
    y, per_warp = empty(x, (len(x), columns)), min(most, 2)
    blocks = -(-columns // (_WARPS * per_warp)) if len(x) else 0
    arrays = x, values, scales, None if bias is None else contiguous(bias), y
    template = *dtype_names(x, values), str(most), str(per_warp)
    launch.launch("quantized.few_rows", template, blocks, 32 * _WARPS, *arrays, len(x), depth, columns)
    return y, (scales, values)


def _quantized_vjp(g: Any, residuals: Any, needs: Any) -> tuple[Any, ...]:
    scales, values = residuals
    dx = batched_product(contiguous(g, scales.dtype), _dequantized(scales, values)) if needs[0] else None
    return dx, None, None, column_sums(g, scales.dtype) if needs[3] else None


def _dequantized(scales: Any, values: Any) -> Any:
    table, dtypes = empty(scales, values.shape), dtype_names(values, scales, scales)
    grid = grid_for_rows(len(values), table)
    launch.launch("columns.scale_rows", dtypes, *grid, values, scales, table, *values.shape)
    return table


_QUANTIZED, _PROJECT = (_quantized_forward, _quantized_vjp), (_project_forward, _project_vjp)
KERNELS = [
    Kernel("cupy.linear", "linear", "cupy", *_FUNCTIONS, dtypes=FLOATS, why_not=why_not),
    Kernel("cupy.project_heads", "project_heads", "cupy", *_PROJECT, dtypes=FLOATS, why_not=why_not),
    Kernel("cupy.quantized_linear", "quantized_linear", "cupy", *_QUANTIZED, why_not=_quantized_why_not),
]
