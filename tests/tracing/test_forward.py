"""jvp is the transpose of vjp, and that of torch and JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import xformer as xf
from tests.conftest import library_or_skip
from tests.reference import for_each, raises_line
from tests.tracing.cases import ROWS
from tests.tracing.gradcheck import directions
from tests.tracing.test_extensions import CASES
from tests.tracing.test_numpy_functions import ROWS as NUMPY_ROWS
from xformer.backends import array_namespace, is_complex
from xformer.errors import ConfigError, DifferentiationError, ShapeError, XformerError

ALL = [*((str(row), row.function, row.inputs) for row in ROWS), *CASES]
ALL += [(f"np.{name}", lambda xp, x, f=function: f(x), (np.asarray(x, float),)) for name, function, x in NUMPY_ROWS]


def outputs_of(function: Any, *inputs: Any) -> tuple[Any, ...]:
    outputs = function(array_namespace(*inputs), *inputs)
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def product(xs: Any, ys: Any) -> float:
    """Return the real part of the sum of products, which is the pairing of tangents and cotangents."""
    return float(sum(np.sum(np.real(x * y)) for x, y in zip(xs, ys, strict=True) if x is not None))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@for_each("name", sorted({name.split("-")[0] for name, *_ in ALL}))
def test_forward_and_reverse_mode_agree(name):
    for label, function, inputs in ALL:
        if label.split("-")[0] == name:
            along = directions(inputs, seed=2)
            expected, pullback = xf.vjp(lambda *x, f=function: outputs_of(f, *x), *inputs)
            outputs, tangents = xf.jvp(lambda *x, f=function: outputs_of(f, *x), inputs, along)
            for y, expected_y, tangent in zip(outputs, expected, tangents, strict=True):
                np.testing.assert_allclose(y, expected_y, rtol=1e-12, atol=1e-12)
                assert tangent is None or (tangent.shape, tangent.dtype) == (y.shape, y.dtype)
            weights = directions(outputs, seed=3)
            weights = tuple(w * (1 - 2j) if is_complex(y.dtype) else w for w, y in zip(weights, outputs, strict=True))
            actual = product(tangents, weights)
            np.testing.assert_allclose(actual, product(pullback(weights), along), rtol=1e-9, atol=1e-9, err_msg=label)


def assert_tangents(expected: Any, label: str, function: Any, inputs: Any) -> None:
    tangents = xf.jvp(lambda *x: outputs_of(function, *x), inputs, directions(inputs, seed=2))[1]
    for x, y in zip(tangents, expected, strict=True):
        if x is not None and not label.startswith("unique"):  # others have no derivatives of those
            np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-8, err_msg=label)


# Torch takes tangents of symmetric matrices for symmetric ones, and powers of complex numbers drop a part.
UNLIKE_TORCH = ("linalg.cholesky", "linalg.eigh", "complex powers", "complex scalars")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which torch.func.jvp imports
@for_each("label, function, inputs", [*CASES, *((str(row), row.function, row.inputs) for row in ROWS)])
def test_tangents_are_those_of_torch(label, function, inputs):
    torch, xp = pytest.importorskip("torch"), library_or_skip("torch")
    along = directions(inputs, seed=2)
    if label in UNLIKE_TORCH:
        return

    def outputs(*x: Any) -> tuple[Any, ...]:
        outputs = function(xp, *x)
        return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)

    try:
        expected = torch.func.jvp(outputs, *(tuple(map(torch.asarray, each)) for each in (inputs, along)))[1]
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError, XformerError):
        return  # torch lacks the function, or a form of it, or arrays are mixed
    assert_tangents([y.resolve_conj() for y in expected], label, function, inputs)


OF_JAX = [*(case for case in CASES if case[0] in UNLIKE_TORCH), *CASES[::10]]  # JAX compiles each operation


@for_each("label, function, inputs", OF_JAX)
def test_tangents_are_those_of_jax(label, function, inputs):
    jax = pytest.importorskip("jax")
    with jax.enable_x64():
        inputs_of_jax, along = tuple(map(jax.numpy.asarray, inputs)), directions(inputs, seed=2)
        expected = jax.jvp(lambda *x: outputs_of(function, *x), inputs_of_jax, along)[1]
    assert_tangents(expected, label, function, inputs)


def cube(x: Any) -> Any:
    return array_namespace(x).sum(x**3)


X, V = np.asarray([1.0, 2.0, -1.0]), np.asarray([0.5, 1.0, 2.0])


def test_forward_mode_nests_with_itself_and_with_reverse_mode():
    assert xf.jvp(lambda x: xf.jvp(lambda y: y**3 * x, (x,), (1.0,))[1], (2.0,), (1.0,)) == (24.0, 36.0)
    np.testing.assert_allclose(xf.hvp(cube, (X,), (V,)), 6.0 * X * V)
    np.testing.assert_allclose(xf.grad(lambda x: xf.jvp(cube, (x,), (V,))[1])(X), 6.0 * X * V)
    np.testing.assert_allclose(xf.grad(lambda v: xf.jvp(cube, (X,), (v,))[1])(V), 3.0 * X * X)
    np.testing.assert_allclose(xf.jit(lambda x, v: xf.jvp(cube, (x,), (v,))[1])(X, V), 3.0 * np.sum(X * X * V))
    np.testing.assert_allclose(xf.jvp(xf.jit(xf.remat(cube)), (X,), (V,))[1], 3.0 * np.sum(X * X * V))
    first, second = xf.hvp(lambda x, y: array_namespace(x).sum(x * x * y), (X, V), (V, X))
    np.testing.assert_allclose(first, 2.0 * V * V + 2.0 * X * X)
    np.testing.assert_allclose(second, 2.0 * X * V)


def test_trees_and_auxiliary_output():
    output, tangent, aux = xf.jvp(
        lambda tree, n: ({"y": tree["a"] * n, "n": n}, tree["b"]),
        ({"a": X, "b": V}, np.asarray(3)),
        ({"a": V, "b": X}, None),
        has_aux=True,
    )  # fmt: skip
    np.testing.assert_array_equal(output["y"], 3.0 * X)
    np.testing.assert_array_equal(tangent["y"], 3.0 * V)
    assert tangent["n"] is None
    np.testing.assert_array_equal(aux, V)
    constant = xf.jvp(lambda x: xf.stop_gradient(x) * 2.0, (X,), (V,))[1]
    np.testing.assert_array_equal(constant, 0.0 * X)


def test_writes_have_tangents():
    def written(x: Any) -> Any:
        y = array_namespace(x).zeros_like(x)
        part = y[1:]
        y[0] = x[1] * x[2]
        part += x[:2] ** 2
        return y

    np.testing.assert_allclose(xf.jvp(written, (X,), (V,))[1], [V[1] * X[2] + X[1] * V[2], *(2.0 * X * V)[:2]])


def write(x: Any) -> Any:
    x[0] = 1.0
    return x


@for_each("primals, tangents, message", [
    (X, V, "jvp got primals of type ndarray; expected a tuple"),
    ((X,), V, "jvp got tangents of type ndarray; expected a tuple"),
    ((X,), (V[:2],), r"\['float64 \(2,\)'\]; expected floating arrays of the shapes of the primals, \[\(3,\)\]"),
    ((X,), (np.arange(3),), r"tangents are \['int64 \(3,\)'\]; expected floating arrays"),
    ((2.0,), (1,), r"tangents are \['an int'\]; expected floating arrays"),
    ((object(),), (V,), "jvp got an object; expected a floating array"),
    ((X,), (V * 1j,), "the tangents are"),
    ((X,), (), "the tangents are"),
    ((X,), (V.astype(int),), "the tangents are"),
    ((np.asarray(3),), (np.asarray(1.0),), "the tangents are"),
    ((3,), (1.0,), "jvp got an int; expected a floating array"),
])  # fmt: skip
def test_wrong_tangents_are_refused(primals, tangents, message):
    with raises_line(ShapeError, message):
        xf.jvp(cube, primals, tangents)


def test_wrong_functions_are_refused():
    with raises_line(ConfigError, "jvp got 3; expected a function"):
        xf.jvp(3, (X,), (V,))
    with raises_line(ConfigError, "hvp got 3; expected a function"):
        xf.hvp(3, (X,), (V,))
    with raises_line(ConfigError, "grad got 3; expected a function"):
        xf.grad(3)
    with raises_line(ShapeError, "hvp got primals of type ndarray; expected a tuple"):
        xf.hvp(cube, X, V)
    with raises_line(DifferentiationError, "the function writes into its argument"):
        xf.jvp(write, (X.copy(),), (V,))
    with raises_line(ShapeError, "expected .value, auxiliary output."):
        xf.jvp(cube, (X,), (V,), has_aux=True)
