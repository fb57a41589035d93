"""vmap computes what a Python loop computes; compositions are those of torch, jacobian and hessian those of JAX."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import xformer as xf
from tests.conftest import library_or_skip
from tests.reference import for_each, raises_line
from tests.tracing.cases import ROWS
from tests.tracing.test_extensions import CASES
from tests.tracing.test_numpy_functions import ROWS as NUMPY_ROWS
from xformer.backends import array_namespace, from_host, is_complex, is_floating, resolve, to_host
from xformer.errors import ConfigError, DifferentiationError, JitError, ShapeError

SCALES = (1.0, 0.97, 1.01)
ALL = [*((str(row), row.function, row.inputs) for row in ROWS), *CASES]


def outputs_of(function: Any, *inputs: Any) -> tuple[Any, ...]:
    outputs = function(array_namespace(*inputs), *inputs)
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)


def looped(function: Any, axes: Any, *inputs: Any) -> list[Any]:
    """Call a function for each element in Python, and stack the results."""
    parts = [
        [x if axis is None else np.take(x, i, axis=axis) for x, axis in zip(inputs, axes, strict=True)]
        for i in range(3)
    ]
    return [np.stack(items) for items in zip(*(outputs_of(function, *map(np.asarray, x)) for x in parts), strict=True)]


def check(function: Any, inputs: Any, axes: Any, library: str = "numpy") -> None:
    batches = [
        x if axis is None else np.stack([x * scale for scale in SCALES], axis=axis)
        for x, axis in zip(inputs, axes, strict=True)
    ]
    xp = resolve(library)
    given = batches if library == "numpy" else [from_host(xp, x) for x in batches]
    actual = xf.vmap(lambda *x: outputs_of(function, *x), axes)(*given)
    for x, y in zip(actual, looped(function, axes, *batches), strict=True):
        assert array_namespace(x).name == library
        x = to_host(x)
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9)


def axes_of(inputs: Any) -> list[tuple[Any, ...]]:
    """Return all in the first axis, in the second one where there is one, and only some of several arguments."""
    found = [(0,) * len(inputs), tuple(min(1, x.ndim) for x in inputs)]
    for i in range(len(inputs) if len(inputs) > 1 else 0):
        found += [(*[None] * i, 0, *[None] * (len(inputs) - i - 1)), (*[0] * i, None, *[0] * (len(inputs) - i - 1))]
    return found


@for_each("name", sorted({name.split("-")[0] for name, *_ in ALL}))
def test_every_function_computes_what_a_loop_does(name):
    for label, function, inputs in ALL:
        if label.split("-")[0] == name:
            for axes in axes_of(inputs):
                check(function, inputs, axes)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@for_each("name, function, x", [row for row in NUMPY_ROWS if row[0] != "real_if_close"])
def test_functions_of_numpy(name, function, x):
    check(lambda xp, x: function(x), (np.asarray(x),), (0,))


@for_each("library", ["torch", "array_api_strict", "jax"])
def test_other_libraries(library):
    library_or_skip(library)
    for row in ROWS[:: 10 if library == "jax" else 5]:
        if row.numpy_only or row.name in ("getitem", "setitem", "to_device", "from_dlpack"):
            continue
        if row.name.startswith("unique") or (library == "jax" and row.name == "nextafter"):
            continue
        with pytest.importorskip("jax").enable_x64() if library == "jax" else contextlib.nullcontext():
            check(row.function, row.inputs, axes_of(row.inputs)[0], library)


def weighted(function: Any) -> Any:
    """Return a function of several arrays with a scalar result."""

    def total(*inputs: Any) -> Any:
        xp, result = array_namespace(*inputs), 0.0
        for y in outputs_of(function, *inputs):
            if is_complex(y.dtype):
                y = 1.3 * xp.real(y) + xp.imag(y) ** 2
            if is_floating(y.dtype):
                weights = np.cos(np.arange(np.prod(y.shape))).reshape(y.shape)
                result = result + xp.sum(weights * y * y) + 0.3 * xp.sum(y)
        return result

    return total


COMPOSED = {
    "vmap of grad": lambda f, numbers, x: xf.vmap(xf.grad(f, numbers))(*x),
    "grad of vmap": lambda f, numbers, x: xf.grad(lambda *y: np.sum(xf.vmap(f)(*y)), numbers)(*x),
    "vmap of remat": lambda f, numbers, x: xf.vmap(xf.grad(xf.remat(f), numbers))(*x),
    "jit of vmap of grad": lambda f, numbers, x: xf.jit(xf.vmap(xf.grad(f, numbers)))(*x),
    "vmap of jit": lambda f, numbers, x: xf.vmap(lambda *y: xf.vjp(xf.jit(f), *y)[1](np.asarray(1.0)))(*x),
}


@for_each("composed", list(COMPOSED))
def test_derivatives_of_batches(composed):
    for label, function, inputs in ALL[len(composed) % 2 :: 2]:
        f, numbers = weighted(function), range(len(inputs))
        batches = [np.stack([x * scale for scale in SCALES]) for x in inputs]
        if composed.startswith("jit") and (label.startswith("unique") or label == "getitem-2x3"):
            with raises_line(JitError, "depends on values|boolean array"):
                COMPOSED[composed](f, numbers, batches)
            continue
        actual = COMPOSED[composed](f, numbers, batches)
        for i in range(3):
            expected = xf.grad(f, numbers)(*(x[i] for x in batches))
            for x, y in zip(actual, expected, strict=True):
                np.testing.assert_allclose(x[i], y, rtol=1e-8, atol=1e-8 * (1.0 + np.max(np.abs(y), initial=0.0)))


# Transformations of a function that keeps shapes: of xformer and of torch.func, which both have most of these names.
def transformed(name: str, f: Any, module: Any, xp_of: Any, axis: int) -> Any:
    return {
        "grad": lambda x: module.grad(lambda y: xp_of(y).sum(xp_of(y).cos(f(y))))(x),
        "jvp": lambda x: module.jvp(f, (x,), (xp_of(x).cos(x),))[1],
        "vmap": lambda x: module.vmap(f, axis % x.ndim, axis % x.ndim)(x) if x.ndim else f(x),
        "closure": lambda x: module.vmap(lambda y: f(y) + y * xp_of(x).sum(f(x) * x))(x) if x.ndim else f(x),
        "jacobian": lambda x: xp_of(x).sum(
            (xf.jacobian if module is xf else module.jacrev)(f)(x), axis=tuple(range(x.ndim))
        ),
        "jit": xf.jit(f) if module is xf else f,
        "vjp": lambda x: module.vjp(f, x)[1](xp_of(x).sin(x))[0],
    }[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which torch.func.jvp imports
@for_each("seed", list(range(60)))
def test_random_compositions_are_those_of_torch(seed):
    torch, xp = pytest.importorskip("torch"), library_or_skip("torch")
    generator = np.random.default_rng(seed)
    names = ["grad", "jvp", "vmap", "closure", "jacobian", "jit", "vjp"]
    chain = [(names[i], int(generator.integers(3))) for i in generator.integers(len(names), size=3)]
    x = generator.uniform(0.2, 1.0, size=(2, 3, 2))

    def compute(module: Any, xp_of: Any, x: Any) -> Any:
        def f(x: Any) -> Any:
            xp = xp_of(x)
            return xp.tanh(x) * xp.sum(x * x) + xp.flip(x) ** 2

        for name, axis in chain:
            f = transformed(name, f, module, xp_of, axis)
        return f(x)

    expected = compute(torch.func, lambda x: xp, torch.asarray(x))
    np.testing.assert_allclose(compute(xf, array_namespace, x), expected, rtol=1e-9, atol=1e-9, err_msg=str(chain))


MATRIX = np.arange(6.0).reshape(2, 3) / 3.0 + 0.1
TREES = {
    "array": (lambda x: x[0] * x, 0, (MATRIX,)),
    "scalar": (lambda x: (x**3).sum(), 0, (MATRIX,)),
    "trees": (lambda p, x: {"y": p["w"] @ x, "z": (p["b"] * x[0] ** 2,)}, (0, 1),
              ({"w": MATRIX, "b": MATRIX[0]}, MATRIX[1])),
    "second": (lambda x, y: (x * y).sum(axis=1), 1, (MATRIX, MATRIX + 1.0)),
    "aux": (lambda x: ((x * x).sum(axis=0), x), 0, (MATRIX,)),
}  # fmt: skip


@for_each("name", list(TREES))
def test_jacobians_and_hessians_are_those_of_jax(name):
    jax = pytest.importorskip("jax")
    function, argnums, inputs = TREES[name]
    has_aux = name == "aux"
    for transform in ("jacobian", "hessian"):
        actual = getattr(xf, transform)(function, argnums, has_aux=has_aux)(*inputs)
        with jax.enable_x64():
            expected = getattr(jax, transform)(function, argnums, has_aux=has_aux)(
                *jax.tree.map(jax.numpy.asarray, inputs)
            )
            flat, structure = jax.tree.flatten(actual)
            assert structure == jax.tree.structure(expected)
        for x, y in zip(flat, jax.tree.leaves(expected), strict=True):
            assert x.shape == y.shape
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


AXES = [
    (lambda x, y: x @ y, (0, None), 0, (MATRIX, MATRIX[0])),
    (lambda x, y: (x * y, x), (1, 0), (1, 0), (np.ones((2, 3)), np.arange(6.0).reshape(3, 2))),
    (lambda x, t: {"a": x * t["b"], "c": t["d"][0]}, (-1, {"b": 0, "d": [None]}), {"a": -1, "c": None},
     (MATRIX, {"b": np.arange(3.0), "d": [np.ones(2)]})),
    (lambda t: t[0] + t[1].sum(), ((0, None),), 0, ((MATRIX, MATRIX),)),
    (lambda x: (1.0, x), 0, 0, (MATRIX,)),
    (lambda x: x, [1], 0, (MATRIX,)),
]  # fmt: skip


@for_each("function, in_axes, out_axes, inputs", AXES)
def test_axes_are_those_of_jax(function, in_axes, out_axes, inputs):
    jax = pytest.importorskip("jax")
    actual = xf.vmap(function, in_axes, out_axes)(*inputs)
    with jax.enable_x64():
        expected = jax.vmap(function, in_axes, out_axes)(*jax.tree.map(jax.numpy.asarray, inputs))
        for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(x, y)


def test_writes_of_batches_into_what_all_share():
    def f(x: Any) -> Any:
        xp = array_namespace(x)
        y, plain = xp.zeros(3), xp.asarray(np.zeros(3), copy=True)
        part = y[1:]
        y[0] = x[1]
        part += x[:2]
        plain[xp.argmax(x)] = x[0]
        for item in xp.reshape(plain, (3, 1)):
            item *= 2.0
        stopped = xf.stop_gradient(y)
        y[2] = 5.0
        return y, plain, stopped

    for actual, expected in zip(xf.vmap(f)(MATRIX), zip(*map(f, MATRIX), strict=True), strict=True):
        np.testing.assert_array_equal(actual, np.stack(expected))


@for_each("function", [
    lambda xp, x: xp.expand_dims(x, axis=(0, -1)),
    lambda xp, x: xp.expand_dims(x, axis=-2),
    lambda xp, x: (xp.argmax(x), xp.argmin(x, keepdims=True), xp.repeat(x, 2), xp.roll(x, 1)),
    lambda xp, x: xp.count_nonzero(x > 0.5),
    lambda xp, x: (xp.sum(x[0]), xp.sum(x[0], axis=-1), xp.max(x[0], keepdims=True), xp.flip(x[0])),
    lambda xp, x: (x[xp.argsort(x)], xp.eye(3)[xp.argmax(x), :], xp.take(xp.eye(3), xp.argsort(x), axis=1)),
    lambda xp, x: (xp.linspace(x[0], 2.0, 3), xp.full((2,), x[1]), xp.asarray([x[0], 1.0]), xp.isin(x, np.ones(2))),
    lambda xp, x: (xp.clip(x, min=x[0]), xp.where(x > 1.0, x, 0.0), xp.searchsorted(np.arange(3.0), x), xp.floor(x)),
    lambda xp, x: (xp.reshape(x, (1, -1)), np.einsum("i,j->ij", x, x), x.T @ x, np.interp(x, [0.0, 2.0], [1.0, 5.0])),
])  # fmt: skip
def test_functions_with_batches_in_unusual_places(function):
    check(function, (MATRIX[1],), (0,))


def test_models():
    config = xf.LanguageModelConfig(vocab_size=8, d_model=8, num_heads=2, d_ff=8, num_layers=1)
    model, tokens = xf.LanguageModel(config, xp=np, seed=0), np.arange(12).reshape(3, 1, 4) % 8

    def loss(model: Any, tokens: Any) -> Any:
        logits = model(tokens[:, :-1], rng=xf.Rng(0))
        return array_namespace(logits).mean(xf.cross_entropy(logits, tokens[:, 1:]))

    per_example = xf.vmap(xf.grad(loss), in_axes=(None, 0))(model, tokens)
    slope = xf.jvp(lambda model: loss(model, tokens[0]), (model,), (model,))[1]
    expected = [dict(xf.grad(loss)(model, each).named_arrays()) for each in tokens]
    for name, gradient in per_example.named_arrays():
        for x, y in zip(gradient, expected, strict=True):
            np.testing.assert_allclose(x, y[name], rtol=1e-3, atol=1e-6)
    inner = sum(np.sum(expected[0][name] * x) for name, x in model.named_parameters())
    np.testing.assert_allclose(slope, inner, rtol=1e-4)


def test_random_draws_follow_a_mapped_counter():
    def f(x: Any, count: Any) -> Any:
        keep, _ = xf.Rng(0).with_counter(count).bernoulli(0.5, (64,), array_namespace(x))
        return array_namespace(x).where(keep, x, 0.0)

    x, counts = np.ones((3, 64)), np.arange(3)
    np.testing.assert_array_equal(xf.vmap(f)(x, counts), np.stack([f(*each) for each in zip(x, counts, strict=True)]))


def test_no_elements():
    x = np.zeros((0, 3))
    results = xf.vmap(lambda x: (np.sin(x), np.sort(x) @ x, np.meshgrid(x, x)[0]))(x)
    assert [y.shape for y in results] == [(0, 3), (0,), (0, 3, 3)]


def branch(x: Any) -> Any:
    return x if x[0] > 0.0 else -x


def write(x: Any) -> Any:
    x[0] = 1.0
    return x


@for_each("function, axes, inputs, kind, message", [
    (branch, 0, (MATRIX,), DifferentiationError, "bool reads an array in vmap .*; use xp.where instead of a branch"),
    (lambda x: float(x[0]), 0, (MATRIX,), DifferentiationError, "float reads an array in vmap that has a value"),
    (lambda x: np.asarray(x), 0, (MATRIX,), DifferentiationError, "np.asarray reads an array in vmap"),
    (lambda x: x[x > 1.0], 0, (MATRIX,), ShapeError, "getitem has results of different shapes for the elements"),
    (lambda x: (x * 1.0).__iadd__(np.ones((2, 3))), 0, (MATRIX,), ValueError, "non-broadcastable|broadcast"),
    (lambda x: x + np.ones(4), 0, (MATRIX,), ValueError, r"shapes \(3,\) \(4,\)"),
    (lambda x: np.sum(x, axis=1), 0, (MATRIX,), np.exceptions.AxisError, "axis 1 is out of bounds for array"),
    (lambda x: np.linalg.inv(x), 0, (MATRIX,), np.linalg.LinAlgError, "1-dimensional array given"),
    (lambda x: x[0] @ x, 0, (MATRIX,), ValueError, "does not have enough dimensions"),
    (write, 0, (MATRIX,), DifferentiationError, "the function writes into its argument, which vjp, jvp, vmap and"),
    (lambda x, y: x, 0, (MATRIX, MATRIX.T), ShapeError, r"got sizes \[2, 3\] along the mapped axes"),
    (lambda x, y: x, (0,), (MATRIX, MATRIX), ShapeError, r"in_axes is \(0,\); expected one item for each of 2"),
    (lambda x: x, "0", (MATRIX,), ShapeError, "in_axes has '0' for a tuple; expected an integer, None or a tree"),
    (lambda x: x, True, (MATRIX,), ShapeError, "in_axes has True for a tuple; expected an integer, None or a tree"),
    (lambda x: x, ((0, 0),), (MATRIX,), ShapeError, r"in_axes has \(0, 0\) for an? "),
    (lambda x: x, 2, (MATRIX,), ShapeError, r"got shape \(2, 3\) to map along axis 2, which is not there"),
    (lambda x: x, None, (MATRIX,), ShapeError, "got no array to map"),
    (lambda: 1.0, 0, (), ShapeError, "got no array to map"),
    (lambda x, y: x, 0, (MATRIX, 2.0), ShapeError, r"got shape \(\) to map along axis 0"),
    (lambda x, y: x, 0, (MATRIX, xf.Rng(0)), ShapeError, "got a Rng to map along axis 0; expected arrays; see"),
    (lambda x, y: x, 0, (MATRIX, xf.Rng(0).split(2)), ShapeError, "got a Rng to map along axis 0"),
])  # fmt: skip
def test_wrong_calls_are_refused(function, axes, inputs, kind, message):
    with raises_line(kind, message):
        xf.vmap(function, axes)(*inputs)


def test_wrong_results_are_refused():
    with raises_line(ShapeError, "out_axes is None for a result that differs between elements"):
        xf.vmap(lambda x: x, out_axes=None)(MATRIX)
    with raises_line(ShapeError, r"out_axes has 2 for results of shape \(3,\)"):
        xf.vmap(lambda x: x, out_axes=2)(MATRIX)
    with raises_line(ShapeError, r"out_axes has \(0, 0\) for a"):
        xf.vmap(lambda x: (x, x, x), out_axes=(0, 0))(MATRIX)
    with raises_line(ShapeError, "returned complex128; jacobian expects floating arrays"):
        xf.jacobian(np.fft.fft)(MATRIX)
    with raises_line(ShapeError, "returned None; jacobian expects floating arrays"):
        xf.jacobian(lambda x: None)(MATRIX)
    for name in ("vmap", "jacobian", "hessian"):
        with raises_line(ConfigError, f"{name} got 3; expected a function"):
            getattr(xf, name)(3)
    with raises_line(ShapeError, "argument 0 is an int; expected a floating array"):
        xf.hessian(lambda x: x * x)(3)
    assert xf.hessian(lambda x: x**3)(2.0) == 12.0


def test_arrays_are_refused_after_their_call():
    kept: list[Any] = []
    xf.vmap(lambda x: kept.append(x) or x)(MATRIX)
    with raises_line(DifferentiationError, "after its value_and_grad/vjp/jvp/vmap call had ended"):
        kept[0] + 1.0
