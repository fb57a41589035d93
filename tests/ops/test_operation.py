"""Half precision on libraries that need upcasts: one rounding, the same dtype, their kernels; ranges of arguments."""

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.ops.replace_kernels import replace_kernels
from tests.reference import raises_line, weighted_sum
from xformer import ops
from xformer.errors import DataError
from xformer.ops import Kernel, attention, checks, dropout, gelu, gelu_tanh, linear, project_heads, relu, silu, softmax
from xformer.ops.activations import _gelu
from xformer.ops.operation import OPERATIONS, Signature
from xformer.tracing import grad, vjp

SPACING = {"bfloat16": 2.0**-7, "float16": 2.0**-10}  # of the numbers from 1 to 2
ATTENTION = {"causal": False, "scale": 1.0, "keep_probability": 1.0}


@pytest.fixture(params=SPACING)
def dtype(request, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", "no-native")
    if request.param == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="NumPy knows bfloat16 through ml_dtypes")
    return np.dtype(library_or_skip("numpy").dtype_named(request.param))


def normal(dtype, *shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def heads(x, weight, bias, other):
    return project_heads(x, (weight, bias, 2), (other, None, 1))


def masked(query, key, value):
    return attention(query, key, value, np.asarray([True, False, True, True, False, True]), causal=True)


CASES = {
    "linear": (linear, [(3, 5), (5, 4), (4,)]),
    "linear of no rows": (linear, [(0, 5), (5, 4), (4,)]),
    "project_heads": (heads, [(2, 3, 5), (5, 4), (4,), (5, 3)]),
    "attention": (masked, [(2, 2, 5, 3), (2, 2, 6, 3), (2, 2, 6, 7)]),
    "attention of three axes": (lambda *x: attention(*x), [(2, 5, 3), (2, 6, 3), (2, 6, 7)]),
    "gelu": (gelu, [(4, 5)]),
}


@pytest.mark.parametrize("kernels_are", ["no-native", "portable"])
@pytest.mark.parametrize("case", CASES)
def test_results_and_derivatives_are_rounded_once(case, dtype, kernels_are, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", kernels_are)
    function, shapes = CASES[case]
    arrays = [normal(dtype, *shape, seed=number) for number, shape in enumerate(shapes)]
    actual, pull = vjp(function, *arrays)
    exact, exact_pull = vjp(function, *(array.astype("float64") for array in arrays))
    several = isinstance(actual, tuple)
    actual, exact = (actual, exact) if several else ((actual,), (exact,))
    g = tuple(normal(dtype, *y.shape, seed=9) for y in actual)
    exact_g = tuple(one.astype("float64") for one in g)
    actual += pull(g if several else g[0])
    exact += exact_pull(exact_g if several else exact_g[0])
    for result, expected in zip(actual, exact, strict=True):
        assert result.dtype == dtype
        assert result.shape == expected.shape
        error = np.abs(result.astype("float64") - expected)
        assert (error <= 0.6 * SPACING[dtype.name] * np.abs(expected) + 1e-5).all()


def test_explain_names_the_kernel_of_upcast_arrays(dtype, monkeypatch):
    definitions = [OPERATIONS[name].definition for name in ("linear", "project_heads", "attention", "gelu")]
    kernels = {
        each.operation: [each._replace(name=f"test.{each.operation}", backend="numpy", dtypes=("float32",))]
        for each in definitions
    }
    replace_kernels(monkeypatch, "numpy", kernels)
    three = [normal(dtype, 1, 2, 3, 4)] * 3
    for operation, arrays, static in (
        ("linear", (three[0], normal(dtype, 4, 2), None), {}),
        ("project_heads", (normal(dtype, 1, 3, 4), normal(dtype, 4, 2), None), {"heads": (2,)}),
        ("attention", (*three, None, None, None), ATTENTION),
        ("gelu", (three[0],), {}),
    ):
        lines = ops.explain(operation, *arrays, **static).splitlines()
        assert f"{operation} on numpy: in float32, rounded to {dtype.name}" in lines
        assert any(line.startswith(f"{operation} on numpy: test.{operation}") for line in lines)


def test_dropout_masks_and_python_numbers_keep_the_dtype(dtype):
    x, keep = normal(dtype, 4, 5), normal(dtype, 4, 5, seed=1) > 0
    for function in (relu, silu, gelu_tanh, lambda x: dropout(x, keep, 0.9), lambda x: softmax(x, temperature=0.7)):
        y, pull = vjp(function, x)
        assert y.dtype == pull(y)[0].dtype == dtype
        exact = function(x.astype("float64"))
        np.testing.assert_allclose(y.astype("float64"), exact, rtol=4 * SPACING[dtype.name], atol=1e-3)


def test_second_derivatives_are_rounded(dtype):
    x, weight = normal(dtype, 3, 5), normal(dtype, 5, 4, seed=1)

    def slope(x, weight):
        return weighted_sum(grad(lambda x: weighted_sum(gelu(linear(x, weight)), g))(x), x * x)

    g = normal(dtype, 3, 4, seed=2)
    actual = grad(slope)(x, weight)
    assert actual.dtype == dtype
    g = g.astype("float64")
    exact = grad(slope)(x.astype("float64"), weight.astype("float64"))
    np.testing.assert_allclose(actual.astype("float64"), exact, atol=16 * SPACING[dtype.name] * np.abs(exact).max())


def test_the_check_compares_with_the_rounded_definition(dtype, monkeypatch):
    """A kernel that rounds correctly would differ from a definition in float32."""
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    x, calls = normal(dtype, 4, 5), []

    def forward(x, *, save):
        calls.append(save)
        return _gelu.definition.forward(x.astype("float64"), save=save)[0].astype(dtype), x

    def pull(g, x, needs):
        return _gelu.definition.vjp(g.astype("float64"), x.astype("float64"), needs)

    kernel = Kernel("test.gelu", "gelu", "numpy", forward, pull, tolerance=1e-6)
    replace_kernels(monkeypatch, "numpy", {"gelu": [kernel]})
    monkeypatch.setattr(checks, "_CHECKED", set())
    assert gelu(x).dtype == dtype
    assert calls == [False, True, False]


def test_the_largest_number_is_an_option():
    largest = np.finfo("float64").max
    for scale in (largest, -largest):
        assert ops.embedding(np.ones((2, 1)), np.asarray([0]), scale=scale) == scale


def test_integers_of_a_signature_stay_below_a_size():
    signature = Signature("table: (rows, n) float, ids: (m) int[0, rows), weights: (m) float[0, inf) -> (m, n)", {})
    table, weights = np.ones((2, 3)), np.ones(2)
    signature.check("gather", (table, np.asarray([0, 1]), weights))
    for ids, span in (([0, 2], "0 to 2"), ([-1, 1], "-1 to 1")):
        with raises_line(DataError, f"^gather got ids from {span}; expected 0 to 1, as rows is 2$"):
            signature.check("gather", (table, np.asarray(ids), weights))
