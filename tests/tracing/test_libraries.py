"""One function, one derivative, on every array library; and against the libraries' own differentiation."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import for_each, without_jax
from tests.tracing.cases import ROWS, Row
from tests.tracing.gradcheck import directions
from xformer import ops
from xformer.backends import array_namespace, dtype_name, extra, from_host, to_host
from xformer.errors import BackendError
from xformer.layers import Initializer, LayerNorm
from xformer.tracing import grad, remat, stop_gradient, value_and_grad, vjp
from xformer.tree import with_fields

# --- a function that a Transformer is made of -------------------------------------------------------------------------

TOKENS = np.asarray([[3, 1, 4, 1, 0], [2, 0, 0, 0, 0]])
LABELS = np.asarray([[1, 4, 1, 2, 0], [2, 0, 0, 0, 0]])


def parameters() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    shapes = {
        "embed": (6, 8),
        "mix": (8, 24),
        "out": (8, 8),
        "norm": (8,),
        "shift": (8,),
        "up": (8, 12),
        "down": (12, 8),
    }
    return {name: generator.standard_normal(shape) * 0.5 for name, shape in shapes.items()}


def block(p: dict[str, Any], tokens: Any) -> Any:
    """Embedding, masked causal self-attention, feed-forward, residuals and norms: (batch, length, vocabulary)."""
    xp = array_namespace(p["embed"])
    x = ops.embedding(p["embed"], tokens) * math.sqrt(8.0)
    normal = ops.layer_norm(x, p["norm"], p["shift"])
    heads = xp.reshape(ops.linear(normal, p["mix"]), (*x.shape[:2], 3, 2, 4))
    query, key, value = xp.unstack(xp.permute_dims(heads, (2, 0, 3, 1, 4)))
    mask = xp.reshape(tokens != 0, (tokens.shape[0], 1, 1, tokens.shape[1]))
    attended = xp.permute_dims(ops.attention(query, key, value, mask, causal=True), (0, 2, 1, 3))
    x = x + ops.linear(xp.reshape(attended, x.shape), p["out"])
    hidden = ops.gelu(ops.linear(ops.layer_norm(x, p["norm"], None), p["up"]))
    return ops.linear(x + ops.linear(hidden, p["down"]), xp.matrix_transpose(p["embed"]))


def loss(p: dict[str, Any], tokens: Any, labels: Any) -> Any:
    losses = ops.cross_entropy(block(p, tokens), labels, label_smoothing=0.1)
    return array_namespace(losses).sum(losses)


def moved(xp: Any, dtype: str = "float64") -> tuple[dict[str, Any], Any, Any]:
    arrays = {name: from_host(xp, array, dtype=dtype) for name, array in parameters().items()}
    return arrays, from_host(xp, TOKENS), from_host(xp, LABELS)


def compiled(xp: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """On jax, compile the function as a whole: operation by operation takes many times as long."""
    return importlib.import_module("jax").jit(function) if xp.name == "jax" else function


EXPECTED = value_and_grad(loss)(parameters(), TOKENS, LABELS)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_value_and_gradients_are_those_of_numpy(xp, dtype, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", "no-native")  # compiled kernels have tests of their own
    if xp.name == "jax" and dtype == "float64":
        pytest.skip("the test of checkpointed gradients compiles the same function in float64")
    value, gradients = compiled(xp, value_and_grad(loss))(*moved(xp, dtype))
    assert_close(value, EXPECTED[0], xp=xp, dtype=dtype)
    for name, gradient in gradients.items():
        assert_close(gradient, EXPECTED[1][name], xp=xp, dtype=dtype)


def test_checkpointed_gradients_are_those_of_numpy(xp):
    def remembered(p, tokens, labels):
        losses = ops.cross_entropy(remat(block)(p, tokens), labels, label_smoothing=0.1)
        return array_namespace(losses).sum(losses)

    value, gradients = compiled(xp, value_and_grad(remembered))(*moved(xp))
    assert_close(value, EXPECTED[0], xp=xp, dtype="float64")
    for name, gradient in gradients.items():
        assert_close(gradient, EXPECTED[1][name], xp=xp, dtype="float64")


@without_jax  # which takes eight seconds to compile it, and has the smaller cases below
def test_second_derivatives_are_those_of_numpy(xp):
    def sharpness(p, tokens, labels):
        gradients = grad(loss)(p, tokens, labels)
        return sum(array_namespace(g).sum(g * g) for g in gradients.values())

    expected = grad(sharpness)(parameters(), TOKENS, LABELS)
    for name, gradient in compiled(xp, grad(sharpness))(*moved(xp)).items():
        assert_close(gradient, expected[name], xp=xp, dtype="float64")


# --- every rule -------------------------------------------------------------------------------------------------------

# What a library does not do itself, traced or not.
LACKING = {
    ("torch", "getitem"): "negative steps",
    ("torch", "setitem"): "negative steps",
    ("torch", "to_device"): "no such method",
    ("torch", "unique_all"): "not implemented",
    ("torch", "unique_counts"): "not implemented with positions",
    ("torch", "unique_inverse"): "not implemented with positions",
    ("torch", "unique_values"): "not implemented with positions",
    ("array_api_strict", "getitem"): "boolean indexing is off; an index names every axis",
    ("array_api_strict", "setitem"): "boolean indexing is off; an index names every axis",
    ("array_api_strict", "to_device"): "no device is called cpu",
    ("array_api_strict", "unique_all"): "data-dependent shapes are off",
    ("array_api_strict", "unique_counts"): "data-dependent shapes are off",
    ("array_api_strict", "unique_inverse"): "data-dependent shapes are off",
    ("array_api_strict", "unique_values"): "data-dependent shapes are off",
    ("array_api_strict", "unstack"): "iteration is off",
    ("jax", "setitem"): "arrays are immutable outside of a trace",
}
# jax compiles each operation for each shape, so it gets one row of each rule that does more than arithmetic.
ON_JAX = ["concat", "cumulative_sum", "erf", "getitem", "max", "pow", "prod", "scatter_add", "setitem", "take",
          "take_along_axis", "unstack", "where"]  # fmt: skip
KEYED = ("getitem", "setitem", "attention", "cross_entropy")  # which have a way through for each row


def library_rows() -> list[Any]:
    """Return the rows of each rule: at most three, since shapes and axes are the rule's, not the library's."""
    rows: dict[str, list[Row]] = {}
    for row in ROWS:
        if not row.numpy_only:
            rows.setdefault(row.name, []).append(row)
    few = {name: all_rows if name in KEYED else all_rows[:2] + all_rows[-1:] for name, all_rows in rows.items()}
    cases = [pytest.param("torch", rows, id=f"torch-{name}") for name, rows in few.items()]
    strict = pytest.mark.strict
    cases += [pytest.param("array_api_strict", rows, id=f"strict-{name}", marks=strict) for name, rows in few.items()]
    return cases + [pytest.param("jax", rows[name][:1], id=f"jax-{name}") for name in ON_JAX]


def weighted(row: Row) -> Callable[[tuple[Any, ...]], Any]:
    """Return a scalar function of the row's inputs that draws the same weights on every library."""

    def function(inputs: tuple[Any, ...]) -> Any:
        xp = array_namespace(*inputs)
        outputs = row.function(xp, *inputs)
        outputs = tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
        weights = directions(outputs, seed=1)
        return sum(xp.sum(y * from_host(xp.library, w)) for y, w in zip(outputs, weights, strict=True))

    return function


def slope(row: Row) -> Callable[[tuple[Any, ...]], Any]:
    """Return the derivative of `weighted` along a fixed direction."""

    def function(inputs: tuple[Any, ...]) -> Any:
        xp = array_namespace(*inputs)
        along = directions(inputs, seed=2)
        gradients = grad(weighted(row))(inputs)
        return sum(xp.sum(g * from_host(xp.library, v)) for g, v in zip(gradients, along, strict=True))

    return function


@pytest.mark.parametrize(("xp", "rows"), library_rows(), indirect=["xp"])
def test_every_rule_gives_the_derivatives_that_it_gives_on_numpy(xp, rows):
    skipped = [row.name for row in rows if not compare_with_numpy(xp, row)]
    if len(skipped) == len(rows):
        pytest.skip(LACKING[xp.name, skipped[0]])


def compare_with_numpy(xp: Any, row: Row) -> bool:
    """Compare a row; return whether the library has what it does."""
    inputs = tuple(from_host(xp, np.asarray(x)) for x in row.inputs)
    try:
        row.function(xp, *inputs)
        weighted(row)(inputs)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        assert (xp.name, row.name) in LACKING
        if (xp.name, row.name) != ("jax", "setitem"):
            return False
    if xp.name == "torch" and row.name.startswith("unique"):
        with pytest.raises(NotImplementedError, match="not yet implemented for pytorch"):
            grad(weighted(row))(inputs)
        return True
    function = weighted(row) if xp.name == "jax" else slope(row)
    value, gradients = value_and_grad(function)(inputs)
    expected_value, expected = value_and_grad(function)(tuple(np.asarray(x) for x in row.inputs))
    assert_close(value, expected_value, xp=xp, dtype="float64")
    for actual, reference in zip(gradients, expected, strict=True):
        assert_close(actual, reference, xp=xp, dtype="float64")
    return True


# --- plain arrays among traced ones -----------------------------------------------------------------------------------

MIXES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b,
    "power": lambda a, b: a**b,
    "remainder": lambda a, b: a % b,
    "floor": lambda a, b: a // b + b + a,
    "matmul": lambda a, b: a @ b,
    "less": lambda a, b: array_namespace(a, b).where(a < b, b, a),
    "greater-equal": lambda a, b: array_namespace(a, b).where(a >= b, b, a),
}


@for_each("name", MIXES)
def test_plain_arrays_mix_with_traced_ones_on_either_side(xp, name):
    x, c = np.asarray([[1.5, 2.5], [3.5, 0.6]]), np.asarray([[2.0, 0.7], [1.2, 3.1]])

    def on_the_left(x, c):
        return array_namespace(x).sum(MIXES[name](c, x))

    def on_the_right(x, c):
        return array_namespace(x).sum(MIXES[name](x, c))

    for function in (on_the_right, on_the_left):
        if xp.name == "array_api_strict" and function is on_the_left:
            # Its operators refuse every foreign array before Python can ask ours; functions and methods work.
            with pytest.raises(TypeError, match="Expected Array or Python scalar"):
                grad(lambda x: on_the_left(x, from_host(xp, c)))(from_host(xp, x))
        expected = grad(lambda x, f=function: f(x, array_namespace(x).asarray(c)))(x)
        assert_close(grad(function)(from_host(xp, x), from_host(xp, c)), expected, xp=xp)


def test_plain_arrays_mix_with_traced_ones_in_functions(xp):
    x, c = np.asarray([1.5, 2.5]), np.asarray([2.0, 0.7])

    def function(x, c):
        ns = array_namespace(x, c)
        return ns.sum(
            ns.multiply(c, x)
            + ns.maximum(c, x)
            + ns.where(x < c, c, x)
            + ns.stack([c, x])[0, :] * ns.concat([x, c])[1:3]
        )

    expected = grad(function)(x, c)
    assert_close(grad(function)(from_host(xp, x), from_host(xp, c)), expected, xp=xp)


def test_second_derivatives_of_plain_and_traced_arrays(xp):
    x, c = np.asarray([1.5, 2.5]), np.asarray([2.0, 0.7])

    def function(x, c):
        ns = array_namespace(x)
        return ns.sum(grad(lambda y: ns.sum(y * c * y * x + ns.exp(y) * c))(c) ** 2)

    assert_close(grad(function)(from_host(xp, x), from_host(xp, c)), grad(function)(x, c), xp=xp)


def test_an_outer_variable_may_enter_through_the_cotangent_alone(xp):
    # Inside, everything but the cotangent is plain. Rules must not meet the two side by side: array_api_strict raises.
    x, c = np.asarray([1.5, 2.5]), np.asarray([2.0, 0.7])

    def function(x, c):
        ns = array_namespace(x)
        return ns.sum(grad(lambda y: ns.sum(ops.softmax(y) * x))(c) ** 2)

    assert_close(grad(function)(from_host(xp, x), from_host(xp, c)), grad(function)(x, c), xp=xp)


def test_arrays_of_two_libraries_raise(xp):
    other = library_or_skip("torch" if xp.name == "numpy" else "numpy")
    foreign = other.asarray([1.0, 2.0], dtype=other.float64)

    def mixed(x):
        return array_namespace(x, foreign).sum(x)

    with pytest.raises(BackendError, match="were mixed"):
        grad(mixed)(xp.asarray([1.0, 2.0], dtype=xp.float64))


def test_a_module_of_two_libraries_names_the_arrays(xp):
    other = library_or_skip("torch" if xp.name == "numpy" else "numpy")
    norm = LayerNorm(3, init=Initializer(xp, seed=0))
    mixed = with_fields(norm, bias=other.zeros(3, dtype=other.float32))
    names = f"weight is an array of {xp.name}, and bias of {other.name}; pass one init= to all layers"
    with pytest.raises(BackendError, match=names):
        grad(lambda norm: 0.0)(mixed)


def test_float_and_integer_leaves_keep_their_dtype_and_device(xp):
    tree = {"x": xp.asarray([1.0, 2.0], dtype=xp.float32), "n": xp.asarray([1, 2], dtype=xp.int32)}
    gradient = grad(lambda t: array_namespace(t["x"]).sum(t["x"] * 2.0))(tree)
    assert_close(gradient["x"], [2.0, 2.0], xp=xp, dtype="float32")
    assert gradient["n"] is None
    assert gradient["x"].device == tree["x"].device


def test_stop_gradient_and_vjp(xp):
    x = xp.asarray([1.0, 2.0], dtype=xp.float64)
    result, pullback = vjp(lambda x: x * stop_gradient(x) * x, x)
    assert_close(result, [1.0, 8.0], xp=xp)
    assert_close(pullback(xp.ones_like(x))[0], [2.0, 8.0], xp=xp)


# --- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("torch", "bfloat16"), ("numpy", "float16"), ("numpy", "bfloat16")])
def test_half_precision_leaves_get_half_precision_gradients(name, dtype):
    xp = library_or_skip(name)
    if (name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes", reason="NumPy knows bfloat16 through ml_dtypes")
    p, tokens, labels = moved(xp, dtype)
    exact = {key: to_host(array).astype("float64") for key, array in p.items()}
    for key, gradient in grad(loss)(p, tokens, labels).items():
        assert dtype_name(gradient.dtype) == dtype
        expected = grad(loss)(exact, TOKENS, LABELS)[key]
        error = np.max(np.abs(to_host(gradient).astype("float64") - expected)) / np.max(np.abs(expected))
        assert error < (0.1 if dtype == "bfloat16" else 0.02), key


# --- against the libraries' own differentiation -----------------------------------------------------------------------


def test_torch_autograd_gives_the_same_gradients():
    xp = library_or_skip("torch")
    p, tokens, labels = moved(xp)
    for array in p.values():
        array.requires_grad_(True)
    loss(p, tokens, labels).backward()
    for name, array in p.items():
        assert_close(array.grad, EXPECTED[1][name], xp=xp)


def test_jax_grad_gives_the_same_gradients():
    xp = library_or_skip("jax")
    p, tokens, labels = moved(xp)
    jax = importlib.import_module("jax")
    for name, gradient in jax.jit(jax.grad(loss))(p, tokens, labels).items():
        assert_close(gradient, EXPECTED[1][name], xp=xp)


def test_reading_and_writing_by_position_inside_jax_jit():
    xp = library_or_skip("jax")
    jax = importlib.import_module("jax")
    ids = np.asarray([2, 0, 2, -1])

    def function(x):
        ns = array_namespace(x)
        index = ns.asarray(ids)
        y = ns.take(x, index, axis=0) * x[index] + extra.scatter_add(x * x, ns.asarray([0, 1, 0, 3]), x)
        y = y + ns.take_along_axis(x, ns.argsort(x, axis=0), axis=0) + ns.sort(x, axis=0) + x[::-1, ...]
        return ns.sum(
            ns.prod(y, axis=1)
            + ns.max(x, axis=1) * ns.cumulative_sum(x[:, 0])
            + ns.sum(extra.erf(ns.clip(x, 0.0, 1.0)))
        )

    x = np.random.default_rng(0).standard_normal((4, 3))
    assert_close(jax.jit(grad(function))(from_host(xp, x)), grad(function)(x), xp=xp)


def test_jax_grad_of_our_gradient_is_our_second_derivative():
    xp = library_or_skip("jax")
    jax = importlib.import_module("jax")

    def function(x):
        return array_namespace(x).sum(array_namespace(x).exp(x) * x * x)

    x = from_host(xp, np.asarray([0.5, -1.5]))
    theirs = jax.grad(lambda x: xp.sum(grad(function)(x) ** 2))(x)
    assert_close(grad(lambda x: array_namespace(x).sum(grad(function)(x) ** 2))(x), theirs)


def test_torch_autograd_of_our_gradient_is_our_second_derivative():
    xp = library_or_skip("torch")

    def function(x):
        return array_namespace(x).sum(array_namespace(x).exp(x) * x * x)

    x = xp.asarray([0.5, -1.5], dtype=xp.float64).requires_grad_(True)
    xp.sum(grad(function)(x) ** 2).backward()
    assert_close(grad(lambda x: array_namespace(x).sum(grad(function)(x) ** 2))(x.detach()), x.grad)


# --- jax as it comes --------------------------------------------------------------------------------------------------

WITHOUT_X64 = """
import warnings
warnings.simplefilter("error")
import jax
import numpy as np
from tests.tracing.test_libraries import EXPECTED, loss, moved
from xformer.tracing import value_and_grad
from xformer.backends import resolve

value, gradients = jax.jit(value_and_grad(loss))(*moved(resolve("jax"), "float32"))
for name, expected in EXPECTED[1].items():
    gradient = np.asarray(gradients[name])
    assert gradient.dtype == np.float32, name
    assert np.max(np.abs(gradient - expected)) < 2e-5 * np.max(np.abs(expected)), name
print(value.dtype)
"""


@pytest.mark.slow
def test_jax_without_64_bits_works_in_32():
    library_or_skip("jax")
    done = subprocess.run([sys.executable, "-c", WITHOUT_X64], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "float32", done.stderr
