"""`scan` means what `jax.lax.scan` means."""

from __future__ import annotations

import numpy as np
import pytest

import xformer as xf
from tests.conftest import library_or_skip
from tests.reference import raises_line
from xformer.backends import from_host, to_host
from xformer.errors import ShapeError
from xformer.tree import flatten

XS = np.random.default_rng(0).normal(size=(6, 3))


def body(carry, x):
    total, (count, matrix) = carry
    xp = xf.array_namespace(x["a"])
    total = xp.tanh(matrix @ total + x["a"]) * x["b"]
    return (total, (count + 1.0, matrix)), {"y": xp.sum(total), "z": total}


def arguments(xp):
    put = lambda x: from_host(xp, np.asarray(x))  # noqa: E731
    return (put(np.ones(3)), (put(0.0), put(np.eye(3) / 2))), {"a": put(XS), "b": put(XS[:, 0])}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "array_api_strict"])
def test_it_is_the_loop_of_jax(name, reverse):
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        expected = jax.lax.scan(body, *arguments(library_or_skip("jax")), reverse=reverse)
        actual = xf.scan(body, *arguments(library_or_skip(name)), reverse=reverse)
        assert type(actual[0][1]) is tuple
        assert set(actual[1]) == {"y", "z"}
        for x, y in zip(flatten(actual)[0], flatten(expected)[0], strict=True):
            np.testing.assert_allclose(to_host(x), np.asarray(y), rtol=1e-12)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax", "array_api_strict"])
def test_numbers_are_arrays(name):
    xs = from_host(library_or_skip(name), np.asarray([1.0, 2.0, 3.0], np.float32))
    for init, expected in ((0, (3, [1, 1, 1])), (0.0, (6.0, [1, 1, 1])), ({"n": [1, 2.0]}, (7, [1, 1, 1]))):
        is_tree = isinstance(init, dict)
        step = (lambda c, x: ({"n": [c["n"][0] * 2, c["n"][1] + x]}, 1)) if is_tree else None
        step = step or ((lambda c, x: (c + 1, 1)) if type(init) is int else (lambda c, x: (c + x, True)))
        carry, ys = xf.scan(step, init, xs)
        last = carry["n"][0] - 1 if is_tree else carry
        assert (float(last), [int(y) for y in ys]) == expected


@pytest.mark.parametrize("reverse", [False, True])
def test_derivatives_and_jit(reverse):
    def loss(matrix, xs):
        return xf.scan(lambda carry, x: (matrix @ carry + x, carry), xs[0], xs, reverse=reverse)[0].sum()

    matrix, xs = np.eye(3) * 0.5 + 0.1, XS
    gradients = xf.grad(loss, argnums=(0, 1))(matrix, xs)
    for gradient, position in zip(gradients, (0, 1), strict=True):
        numbers = np.zeros(gradient.shape)
        for index in np.ndindex(gradient.shape):
            shifted = [[x.copy() for x in (matrix, xs)] for _ in range(2)]
            shifted[0][position][index] += 1e-6
            shifted[1][position][index] -= 1e-6
            numbers[index] = (loss(*shifted[0]) - loss(*shifted[1])) / 2e-6
        np.testing.assert_allclose(gradient, numbers, rtol=1e-6)
    compiled = xf.jit(loss)
    assert [compiled(matrix, xs) for _ in range(2)] == [loss(matrix, xs)] * 2
    tangent = xf.jvp(lambda m: loss(m, xs), (matrix,), (np.ones((3, 3)),))[1]
    np.testing.assert_allclose(tangent, gradients[0].sum(), rtol=1e-9)
    batched = xf.vmap(lambda x: xf.scan(lambda c, x: (c + x, c * x), 0.0, x))(XS)
    np.testing.assert_allclose(batched[0], XS.sum(1))


def test_numbers_of_steps_modules_and_training():
    total, powers = xf.scan(lambda carry, _: (carry * 2.0, carry), np.asarray(1.0), length=5)
    assert total == 32
    assert powers.tolist() == [1, 2, 4, 8, 16]
    assert xf.scan(lambda carry, x: (carry, None), 1.0, np.ones(2)) == (1.0, None)

    def step(layer, x):
        value, gradient = xf.value_and_grad(lambda layer: xf.array_namespace(x).sum(layer(x) ** 2))(layer)
        return xf.tree.map_arrays(lambda p, g: p - 0.01 * g, layer, gradient), value

    layer, losses = xf.scan(step, xf.Linear(3, 2, init=0), np.ones((8, 4, 3), np.float32))
    assert isinstance(layer, xf.Linear)
    assert losses.shape == (8,)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((lambda c, x: (c, x), 0.0), "length=None; expected one number of steps"),
        ((lambda c, x: (c, x), 0.0, np.ones((0, 2))), r"shapes \[\(0, 2\)\]"),
        ((lambda c, x: (c, x), 0.0, (np.ones(2), np.ones(3))), r"\[\(2,\), \(3,\)\]"),
        ((lambda c, x: (c, x), 0.0, np.ones(2), 3), "length=3"),
        ((lambda c, x: (c, x), 0.0, None, 2.5), "length=2.5"),
        ((lambda c, x: (c, x), 0.0, np.asarray(2.0)), r"shapes \[\(\)\]"),
        ((lambda c, x: c, 0.0, np.ones(2)), r"a ndarray; expected a pair, \(carry, y\)"),
        ((lambda c, x: (c, x, x), 0.0, np.ones(2)), r"a tuple; expected a pair"),
        ((lambda c, x: (np.stack([c, c]), x), 0.0, np.ones(2)), r"\(2,\), 'float64'.*expected \[\(\(\), 'float64'"),
    ],
)
def test_what_it_refuses(arguments, message):
    with raises_line(ShapeError, message):
        xf.scan(*arguments)
