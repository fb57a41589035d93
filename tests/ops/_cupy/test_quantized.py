"""Products with quantized weights on CuPy against the definition."""

from __future__ import annotations

import numpy as np

from tests.ops._cupy.cuda_cases import LAYOUTS, normal
from tests.reference import for_each
from xformer import ops
from xformer.backends import array_namespace, from_host, to_host
from xformer.ops import linear
from xformer.ops.weights import QuantizedWeight

SIZES = [
    (1, 64, 9),
    (1, 1037, 3),
    (3, 1040, 6),
    (4, 8, 1),
    (6, 300, 5),
    (16, 272, 11),
    (17, 40, 7),
    (0, 5, 3),
    (2, 3, 0),
]
DTYPES, QUANTIZED = ["float32", "float16", "bfloat16"], ["int8", "bfloat16"]


def stored(columns, depth, quantized):
    """Return scales without rounding errors in any dtype, and values."""
    values = np.clip(np.round(40 * normal(columns, depth)), -128, 127)
    return 2.0 ** (np.arange(columns) % 3 - 8), values.astype("int8") if quantized == "int8" else values / 2


def weight_for(x, scales, values):
    """Return the matrix (depth, columns) in the library of x, with scales of its dtype."""
    xp = array_namespace(x)
    dtype = "bfloat16" if values.dtype.kind == "f" else None
    return QuantizedWeight(xp.astype(from_host(xp, scales), x.dtype), from_host(xp, values, dtype=dtype), True)


@for_each("dtype", [*DTYPES, "float64"])
@for_each("quantized", QUANTIZED)
def test_values_and_derivatives(cuda, dtype, quantized):
    for rows, depth, columns in SIZES:
        scales, values = stored(columns, depth, quantized)
        x, bias = normal(rows, depth), normal(columns, seed=1)
        cuda.agree(lambda x, own=(scales, values): linear(x, weight_for(x, *own)), x, dtype=dtype)
        cuda.agree(lambda x, bias, own=(scales, values): linear(x, weight_for(x, *own), bias), x, bias, dtype=dtype)


@for_each("layout", LAYOUTS)
def test_layouts(cuda, layout):
    own = stored(5, 48, "int8")
    for rows in (3, 20):
        cuda.agree(lambda x: linear(x, weight_for(x, *own)), normal(rows, 48), dtype="float32", layout=LAYOUTS[layout])


@for_each("dtype", DTYPES)
@for_each("quantized", QUANTIZED)
def test_a_row_has_the_same_bits_beside_any_number_of_others(cuda, dtype, quantized):
    x = cuda.array(normal(16, 1040), dtype)
    weight = weight_for(x, *stored(9, 1040, quantized))
    together = to_host(linear(x, weight))
    for start, stop in ((0, 1), (7, 8), (2, 4), (5, 9), (3, 11), (1, 16)):
        np.testing.assert_array_equal(to_host(linear(x[start:stop], weight)), together[start:stop])


def test_a_few_rows_read_the_weight_once(cuda_host):
    x = cuda_host.array(normal(16, 64), "float32")
    weight = weight_for(x, *stored(9, 64, "int8"))
    linear(x[:3], weight, cuda_host.array(normal(9), "float32"))
    assert cuda_host.launcher.launched == ["quantized.few_rows<float32, int8, 4, 2>"]
    linear(cuda_host.array(normal(40, 64), "float32"), weight)
    assert cuda_host.launcher.launched[1:] == ["columns.scale_rows<int8, float32, float32>"]


def test_in_reproducible_mode_all_products_have_one_order(cuda, reproducible):
    x = cuda.array(normal(40, 96), "float32")
    weight = weight_for(x, *stored(9, 96, "int8"))
    np.testing.assert_array_equal(to_host(linear(x[:2], weight)), to_host(linear(x, weight))[:2])


REASONS = [
    (("float32", "bfloat16", "bfloat16"), "parameters of dtype bfloat16 with float32 rows"),
    (("float16", "float16", "float32"), "parameters of dtype float32 with float16 rows"),
]


def test_explain_gives_the_reason(cuda):
    values = np.ones((4, 8), "int8")
    for dtypes, reason in REASONS:
        x, scales, bias = map(cuda.array, (np.ones((2, 8)), np.ones(4), np.ones(4)), dtypes)
        text = ops.explain("quantized_linear", x, scales, cuda.array(values), bias)
        assert f"  not cupy.quantized_linear: {reason}" in text
    x, scales = cuda.array(np.ones((2, 8)), "float32"), cuda.array(np.ones(4), "float32")
    wrong = {"the values are not contiguous": values.T.copy().T, "values of dtype int16": values.astype("int16")}
    for reason, own in wrong.items():
        text = ops.explain("quantized_linear", x, scales, cuda.array(own), None)
        assert f"  not cupy.quantized_linear: {reason}" in text
