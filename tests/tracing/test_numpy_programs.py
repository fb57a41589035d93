"""Programs in plain NumPy, of the kinds that HIPS autograd publishes as examples, and its list of functions.

Each program is differentiated as it is, with `numpy` as `np`: once against differences, once again as a Hessian-vector
product, and as a compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import xformer as xf
from tests.reference import for_each, raises_line
from tests.tracing.test_numpy_functions import CASES
from xformer.errors import DifferentiationError
from xformer.tree import flatten

RANDOM = np.random.default_rng(0)
PROGRAMS: dict[str, tuple[Callable[[Any], Any], Any]] = {}


def normal(*shape: int) -> Any:
    return RANDOM.normal(size=shape)


def program(*arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a function of one tree with a scalar result, and the tree."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS[function.__name__] = (function, arguments[0] if len(arguments) == 1 else arguments)
        return function

    return add


def sigmoid(x: Any) -> Any:
    return 0.5 * (np.tanh(x / 2.0) + 1.0)


def logsumexp(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    largest = np.max(x, axis=axis, keepdims=True)
    total = largest + np.log(np.sum(np.exp(x - largest), axis=axis, keepdims=True))
    return total if keepdims else np.squeeze(total, axis=axis)


INPUTS, TARGETS = normal(12, 3), np.eye(4)[RANDOM.integers(0, 4, 12)]


@program(normal(3))
def logistic_regression(weights: Any) -> Any:
    labels = TARGETS[:, 0].astype(bool)
    chances = sigmoid(np.dot(INPUTS, weights))
    right = chances * labels + (1.0 - chances) * (1 - labels)
    return -np.sum(np.log(right)) + 0.1 * weights @ weights


@program([(normal(3, 5), normal(5)), (normal(5, 4), normal(4))])
def neural_network(layers: Any) -> Any:
    x = INPUTS
    for weight, bias in layers:
        outputs = np.dot(x, weight) + bias
        x = np.tanh(outputs)
    penalty = sum(np.sum(weight**2) + np.sum(bias**2) for weight, bias in layers)
    return 0.01 * penalty - np.mean(np.sum((outputs - logsumexp(outputs, 1, keepdims=True)) * TARGETS, axis=1))


@program(normal(2, 3, 3, 1), normal(8, 3))
def convolutional_network(kernels: Any, weight: Any) -> Any:
    images = np.cos(np.arange(3 * 6 * 6.0)).reshape(3, 6, 6, 1)
    rows = np.arange(4)[:, None] + np.arange(3)
    patches = images[:, rows[:, None, :, None], rows[None, :, None, :]]  # (image, row, column, 3, 3, 1)
    maps = np.maximum(np.einsum("nxyijc,kijc->nxyk", patches, kernels), 0.0)
    pooled = maps.reshape(3, 2, 2, 2, 2, 2).max(axis=(2, 4))
    scores = np.dot(pooled.reshape(3, -1), weight)
    return np.sum(logsumexp(scores, axis=1) - np.diag(scores))


@program(normal(5), 0.3 * normal(4))
def gaussian_process(inputs: Any, parameters: Any) -> Any:
    mean, scale, noise = parameters[0], np.exp(parameters[1]), np.exp(parameters[2]) + 0.1
    distances = np.expand_dims(inputs / np.exp(parameters[3]), 1) - np.expand_dims(inputs / np.exp(parameters[3]), 0)
    covariance = scale * np.exp(-0.5 * distances**2) + noise * np.eye(len(inputs))
    deviation = np.sin(np.arange(5.0)) - mean
    root = np.linalg.cholesky(covariance)
    quadratic = np.sum(np.linalg.solve(root, deviation) ** 2)
    return 0.5 * (quadratic + np.linalg.slogdet(covariance)[1] + deviation @ np.linalg.inv(covariance) @ deviation)


@program({"logits": normal(3), "means": normal(3, 2), "roots": normal(3, 2, 2) + 2.0 * np.eye(2)})
def gaussian_mixture(parameters: Any) -> Any:
    weights = parameters["logits"] - logsumexp(parameters["logits"])
    points, densities = INPUTS[:, :2], []
    for weight, mean, root in zip(weights, parameters["means"], parameters["roots"], strict=True):
        precision = np.dot(root.T, root) + 0.1 * np.eye(2)
        deviation = points - mean
        quadratic = np.einsum("ni,ij,nj->n", deviation, precision, deviation)
        densities.append(weight + 0.5 * np.linalg.slogdet(precision)[1] - np.log(2.0 * np.pi) - 0.5 * quadratic)
    return -np.sum(logsumexp(np.vstack(densities), axis=0))


@program(normal(4))
def black_box_variational_inference(parameters: Any) -> Any:
    mean, log_std = parameters[:2], parameters[2:]
    samples = np.random.RandomState(0).randn(20, 2) * np.exp(log_std) + mean
    funnel = -0.5 * (samples[:, 1] / 1.35) ** 2 - 0.5 * (samples[:, 0] * np.exp(-samples[:, 1])) ** 2 - samples[:, 1]
    entropy = 0.5 * 2 * (1.0 + np.log(2.0 * np.pi)) + np.sum(log_std)
    return -(entropy + np.mean(funnel))


def advect(field: Any, vx: Any, vy: Any) -> Any:
    """Move a periodic field along velocities, and interpolate linearly."""
    rows, columns = field.shape
    ys, xs = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    x, y = (xs - vx).ravel(), (ys - vy).ravel()
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    right_weight, bottom_weight = x - left, y - top
    left, right, top, bottom = left % columns, (left + 1) % columns, top % rows, (top + 1) % rows
    upper = (1 - right_weight) * field[top, left] + right_weight * field[top, right]
    lower = (1 - right_weight) * field[bottom, left] + right_weight * field[bottom, right]
    return np.reshape((1 - bottom_weight) * upper + bottom_weight * lower, (rows, columns))


def project(vx: Any, vy: Any) -> Any:
    """Remove the divergence of a velocity field by Jacobi iterations."""
    pressure = np.zeros(vx.shape)
    divergence = -0.5 * (np.roll(vx, -1, axis=1) - np.roll(vx, 1, axis=1) + np.roll(vy, -1, 0) - np.roll(vy, 1, 0))
    for _ in range(3):
        around = np.roll(pressure, 1, axis=1) + np.roll(pressure, -1, axis=1) + np.roll(pressure, (1,), axis=(0,))
        pressure = (divergence + around + np.roll(pressure, -1, axis=0)) / 4.0
    return (
        vx - 0.5 * (np.roll(pressure, -1, axis=1) - np.roll(pressure, 1, axis=1)),
        vy - 0.5 * (np.roll(pressure, -1, axis=0) - np.roll(pressure, 1, axis=0)),
    )


@program(0.4 * normal(2, 4, 5))
def fluid_simulation(velocity: Any) -> Any:
    (vx, vy), smoke = velocity, np.sin(np.arange(20.0)).reshape(4, 5)
    for _ in range(3):
        vx, vy = project(advect(vx, vx, vy), advect(vy, vx, vy))
        smoke = advect(smoke, vx, vy)
    return np.mean((smoke - np.eye(4, 5)) ** 2)


@program({"change": normal(6, 3), "out": normal(4, 3), "start": normal(3)})
def recurrent_network(parameters: Any) -> Any:
    hidden, loss = np.repeat(parameters["start"].reshape(1, -1), 2, axis=0), 0.0
    for step in range(4):
        x = INPUTS[step : step + 2, :2]
        hidden = np.tanh(np.dot(np.hstack((x, hidden, np.ones((2, 1)))), parameters["change"]))
        logits = np.dot(np.hstack((hidden, np.ones((2, 1)))), parameters["out"])
        loss -= np.sum((logits - logsumexp(logits, axis=1, keepdims=True)) * TARGETS[step : step + 2, :3])
    return loss


@program({"gates": normal(4, 5, 3), "out": normal(3, 2)})
def lstm(parameters: Any) -> Any:
    hidden, cell, outputs = np.zeros((2, 3)), np.zeros((2, 3)), []
    for step in range(3):
        joined = np.concatenate([INPUTS[step : step + 2, 1:], hidden], axis=1)
        change = np.tanh(joined @ parameters["gates"][0])
        forget, ignore, out = (sigmoid(joined @ gate) for gate in parameters["gates"][1:])
        cell = cell * forget + ignore * change
        hidden = out * np.tanh(cell)
        outputs.append(hidden @ parameters["out"])
    return np.sum(np.array(np.stack(outputs).shape)) + np.std(np.stack(outputs), axis=(0, 1), ddof=1).sum()


@program(np.asarray([1.5, 0.5]), np.asarray([0.6, 0.9, 0.7]))
def ode_fit(start: Any, rates: Any) -> Any:
    def slope(state: Any) -> Any:
        prey, predators = state
        return np.array([prey * (rates[0] - rates[1] * predators), predators * (prey - rates[2])], like=state)

    states, step = [start], 0.1
    for _ in range(6):
        state = states[-1]
        k1 = slope(state)
        k2 = slope(state + step / 2 * k1)
        k3 = slope(state + step / 2 * k2)
        states.append(state + step / 6 * (k1 + 2 * k2 + 2 * k3 + slope(state + step * k3)))
    return np.sum((np.array(states, like=start) - np.linspace(1.0, 2.0, 7)[:, None]) ** 2)


@program(np.asarray([-1.2, 1.0, 0.3, 0.4]))
def rosenbrock(x: Any) -> Any:
    return np.sum(100.0 * (x[1:] - x[:-1] ** 2.0) ** 2.0 + (1.0 - x[:-1]) ** 2.0)


@program(normal(6))
def convex_problem(x: Any) -> Any:
    """A barrier method: a quadratic with inequalities and a total."""
    matrix = np.outer(np.sin(np.arange(6.0)), np.cos(np.arange(6.0))) + 3.0 * np.eye(6)
    slack = 5.0 - np.abs(x)
    return 0.5 * np.dot(x, np.dot(matrix, x)) - np.sum(np.log(slack)) + 10.0 * (np.sum(x) - 1.0) ** 2


@program(normal(6, 5))
def hologram(phases: Any) -> Any:
    field = np.exp(1j * phases) * np.hanning(7)[1:-1]
    frequencies = np.fft.fftfreq(6)[:, None] ** 2 + np.fft.fftfreq(5) ** 2
    far = np.fft.ifft2(np.fft.fft2(field) * np.exp(-1j * np.pi * frequencies))
    intensity = np.abs(far) ** 2
    return np.sum((intensity / np.mean(intensity) - np.eye(6, 5)) ** 2) + np.sum(np.real(far) * np.imag(np.conj(field)))


@program(normal(3), normal(3, 3), normal(3, 4))
def hidden_markov_model(start: Any, transitions: Any, emissions: Any) -> Any:
    def normalized(logits: Any) -> Any:
        return logits - logsumexp(logits, axis=-1, keepdims=True)

    message = normalized(start) + normalized(emissions)[:, 0]
    for symbol in (2, 1, 3, 0):
        message = logsumexp(message[:, None] + normalized(transitions), axis=0) + normalized(emissions)[:, symbol]
    return -logsumexp(message)


@program(normal(2, 3), normal(3, 2))
def variational_autoencoder(encoder: Any, decoder: Any) -> Any:
    noise = np.random.RandomState(1).randn(12, 1)
    mean, log_std = np.split(np.tanh(INPUTS @ encoder.T), 2, axis=1)
    code = np.append(mean + np.exp(log_std) * noise, mean**2, axis=1)
    logits = code @ decoder.T
    likelihood = np.sum(np.where(INPUTS > 0, -np.logaddexp(0.0, -logits), -np.logaddexp(0.0, logits)))
    return -likelihood - 0.5 * np.sum(1.0 + 2.0 * log_std - mean**2 - np.exp(2.0 * log_std))


@program(np.asarray([0.3, -0.2]))
def bouncing_ball(velocity: Any) -> Any:
    """A loop whose branches read values."""
    position = np.zeros(2)
    trace = np.zeros((8, 2), like=velocity)
    for step in range(8):
        velocity = velocity + np.array([0.0, -0.1])
        position = position + velocity
        if position[1] < -0.75:
            position = position * np.array([1.0, -1.0]) + np.array([0.0, -1.5])
            velocity = velocity * np.array([0.9, -0.8])
        trace[step] = position
    return np.linalg.norm(trace - 1.0)


NOT_COMPILED = {"bouncing_ball", "fluid_simulation"}  # whose values decide on branches, and on elements of plain arrays


def moved(tree: Any, direction: Any, step: float) -> Any:
    leaves, rebuild = flatten(tree)
    return rebuild([x + step * v for x, v in zip(leaves, flatten(direction)[0], strict=True)])


@for_each("name", PROGRAMS)
def test_programs_have_the_derivatives_of_differences(name):
    given, tree = PROGRAMS[name]
    function = (lambda tree: given(*tree)) if isinstance(tree, tuple) else given
    leaves, rebuild = flatten(tree)
    direction = rebuild([normal(*x.shape) for x in leaves])
    value, gradient = xf.value_and_grad(function)(tree)
    np.testing.assert_allclose(value, function(tree), rtol=1e-12)

    def slope(gradient: Any) -> Any:
        return sum(np.sum(g * v) for g, v in zip(flatten(gradient)[0], flatten(direction)[0], strict=True))

    ahead, behind = (moved(tree, direction, step) for step in (1e-6, -1e-6))
    np.testing.assert_allclose(slope(gradient), (function(ahead) - function(behind)) / 2e-6, rtol=2e-5, atol=1e-6)
    output, tangent = xf.jvp(function, (tree,), (direction,))
    np.testing.assert_allclose([output, tangent], [value, slope(gradient)], rtol=1e-9)
    product = xf.hvp(function, (tree,), (direction,))
    backward = xf.grad(lambda tree: slope(xf.grad(function)(tree)))(tree)
    for forward, x, y, z in zip(
        *(flatten(each)[0] for each in (product, xf.grad(function)(ahead), xf.grad(function)(behind), backward)),
        strict=True,
    ):
        np.testing.assert_allclose(forward, (x - y) / 2e-6, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(z, forward, rtol=1e-8, atol=1e-8)
    if name not in NOT_COMPILED:
        compiled = xf.jit(xf.grad(function))
        for each in (tree, ahead):
            for x, y in zip(flatten(compiled(each))[0], flatten(xf.grad(function)(each))[0], strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_derivatives_of_a_function_of_numbers_to_the_sixth_order():
    derivative: Any = np.tanh
    expected = {0: np.tanh(0.3), 1: 1 - np.tanh(0.3) ** 2}
    for order in range(6):
        if order in expected:
            np.testing.assert_allclose(derivative(0.3), expected[order])
        numbers = np.asarray([derivative(0.3 + 1e-5), derivative(0.3 - 1e-5)])
        derivative = xf.grad(derivative)
        np.testing.assert_allclose(derivative(0.3), (numbers[0] - numbers[1]) / 2e-5, rtol=1e-6)


# What autograd differentiates, or has as a function without a gradient, by the names in NumPy.
DIFFERENTIATED = """
absolute add amax amin angle append arccos arccosh arcsin arcsinh arctan arctan2 arctanh array_split atleast_1d
atleast_2d atleast_3d broadcast_to clip column_stack concatenate conjugate cos cosh cross cumsum deg2rad degrees diag
diagonal diff divide dot dsplit dstack einsum exp exp2 expand_dims expm1 fabs fliplr flipud fmax fmin full gradient
hsplit hstack hypot imag inner kron linspace log log10 log1p log2 logaddexp logaddexp2 matmul max maximum mean min
minimum mod moveaxis multiply nan_to_num negative outer pad partition power prod rad2deg radians ravel real
real_if_close reciprocal remainder repeat reshape roll rollaxis rot90 select sin sinc sinh sort split sqrt square
squeeze stack std subtract sum swapaxes tan tanh tensordot tile trace transpose tril triu var vsplit vstack where
linalg.cholesky linalg.det linalg.eig linalg.eigh linalg.inv linalg.norm linalg.pinv linalg.slogdet linalg.solve
linalg.svd fft.fft fft.fft2 fft.fftn fft.fftshift fft.ifft fft.ifft2 fft.ifftn fft.ifftshift fft.irfft fft.irfft2
fft.irfftn fft.rfft fft.rfft2 fft.rfftn
"""
WITHOUT_GRADIENT = """
all allclose any argmax argmin argpartition argsort argwhere around array_equal array_equiv ceil count_nonzero equal
fix flatnonzero floor floor_divide greater greater_equal iscomplex iscomplexobj isclose isfinite isinf isnan isneginf
isposinf isreal isrealobj less less_equal logical_and logical_not logical_or logical_xor ndim nonzero not_equal
ones_like rint round searchsorted shape sign size trunc zeros_like
"""
MISSING = {
    "full": (lambda x: np.full(3, x[0]), "a traced array was passed to a function of another library"),
    "linalg.eig": (lambda x: np.linalg.eig(x * np.eye(3))[0], "np.linalg.eig of a traced array has no derivative rule"),
}


@for_each("name", WITHOUT_GRADIENT.split())
def test_functions_without_a_gradient_compute_what_they_compute_on_arrays(name):
    x, y = np.asarray([0.5, -1.5, 2.5]), np.asarray([0.5, 1.0, 2.0])
    function = getattr(np, name)
    more = {
        **dict.fromkeys(("array_equal", "array_equiv", "allclose", "isclose", "floor_divide"), (y,)),
        **dict.fromkeys(("equal", "greater", "greater_equal", "less", "less_equal", "not_equal", "searchsorted"), (y,)),
        **dict.fromkeys(("logical_and", "logical_or", "logical_xor"), (y,)),
        "argpartition": (1,),
    }.get(name, ())
    found = []

    def loss(x: Any) -> Any:
        result = function(x, *more)
        found.append(xf.tree.map_arrays(xf.stop_gradient, result))
        np.testing.assert_array_equal(np.asarray(found[-1]), function(np.asarray([0.5, -1.5, 2.5]), *more))
        return np.sum(x)

    np.testing.assert_array_equal(xf.grad(loss)(x), np.ones(3))
    assert len(found) == 1


def test_the_functions_of_autograd_are_differentiated_except_for_two():
    names = {*DIFFERENTIATED.split()}
    assert names - {*CASES} == {*MISSING}
    for function, message in MISSING.values():
        with raises_line(DifferentiationError, message):
            xf.grad(lambda x, f=function: np.sum(np.real(f(x))))(np.asarray([0.5, 1.0, 2.0]))


def test_minimizers_of_scipy_take_gradients_and_products():
    optimize = pytest.importorskip("scipy.optimize")
    product = functools.partial(xf.hvp, rosenbrock)
    for options in ({}, {"method": "trust-ncg", "hessp": lambda x, v: product((x,), (v,))}):
        found = optimize.minimize(rosenbrock, np.zeros(4), jac=xf.grad(rosenbrock), tol=1e-10, **options)
        np.testing.assert_allclose(found.x, np.ones(4), rtol=1e-5)
    fitted = optimize.least_squares(np.tanh, np.ones(3), jac=xf.jacobian(np.tanh))
    np.testing.assert_allclose(fitted.x, np.zeros(3), atol=1e-6)
