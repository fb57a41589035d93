"""Derivatives of xp.linalg, xp.fft and of complex numbers are those of torch and JAX."""

from __future__ import annotations

from typing import Any

import array_api_strict
import numpy as np
import pytest

import xformer as xf
from tests.conftest import library_or_skip
from tests.reference import for_each, raises_line
from xformer.backends import array_namespace, from_host, is_complex, to_host
from xformer.errors import DifferentiationError
from xformer.tracing.rule import DECOMPOSITIONS, NOT_DIFFERENTIABLE, OUTPUT_RULES, RULES

RANDOM = np.random.default_rng(0)
SQUARE, TALL, WIDE, COLUMNS = (RANDOM.normal(size=(2, *shape)) for shape in ((4, 4), (5, 3), (3, 5), (4, 3)))
ROWS, VECTOR = RANDOM.normal(size=(2, 3)), RANDOM.normal(size=4)
SYMMETRIC = SQUARE @ np.swapaxes(SQUARE, -1, -2) + 4.0 * np.eye(4)
INF = np.inf

# By function of an extension: functions of a namespace and arrays, and the arrays. Signs of vectors are arbitrary.
CASES: list[tuple[str, Any, tuple[Any, ...]]] = []


def case(name: str, *inputs: Any, function: Any = None, **options: Any) -> None:
    extension, _, short = name.partition(".")
    default = lambda xp, *arrays: getattr(getattr(xp, extension), short)(*arrays, **options)  # noqa: E731
    CASES.append((name, function or default, inputs))


for _x in (SQUARE, VECTOR * np.eye(4)):
    case("linalg.inv", _x)
    case("linalg.det", _x)
case("linalg.slogdet", SQUARE, function=lambda xp, x: xp.linalg.slogdet(x)[1])
case("linalg.solve", SQUARE, COLUMNS)
case("linalg.solve", SQUARE[0], VECTOR)
case("linalg.solve", SQUARE, COLUMNS[0])
for _upper in (False, True):
    case("linalg.cholesky", SYMMETRIC, upper=_upper)
for _x in (TALL, SQUARE):
    case("linalg.qr", _x)
case("linalg.eigh", SYMMETRIC, function=lambda xp, x: (xp.linalg.eigh(x)[0], xp.linalg.eigh(x)[1] ** 2))
case("linalg.eigvalsh", SYMMETRIC)
for _x in (TALL, WIDE, SQUARE):
    case("linalg.svd", _x, function=lambda xp, x: tuple(y * y for y in xp.linalg.svd(x, full_matrices=False)))
    case("linalg.svdvals", _x)
    case("linalg.pinv", _x)
case("linalg.svd", SQUARE, function=lambda xp, x: tuple(y * y for y in xp.linalg.svd(x)))
for _n in (-2, 0, 1, 3, 6):
    case("linalg.matrix_power", SQUARE, function=lambda xp, x, n=_n: xp.linalg.matrix_power(x, n))
case("linalg.outer", VECTOR, ROWS[0])
case("linalg.cross", ROWS, ROWS + 1.0)
case("linalg.cross", TALL[0, :3], SQUARE[0, :3, :3], axis=0)
for _offset in (-6, -1, 0, 2, 3):
    case("linalg.diagonal", TALL, offset=_offset)
    case("linalg.trace", WIDE, offset=_offset)
for _ord in (2, 1, 3, 0.5, -1.0, INF, -INF):
    case("linalg.vector_norm", TALL, axis=-1, ord=_ord)
case("linalg.vector_norm", TALL, axis=(0, 2), keepdims=True)
case("linalg.vector_norm", ROWS, function=lambda xp, x: xp.linalg.vector_norm(x * (1 + 2j) + 1j))
for _ord in ("fro", "nuc", 2, -2, 1, -1, INF, -INF):
    case("linalg.matrix_norm", TALL, ord=_ord, keepdims=_ord == 1)
for _name in ("matmul", "tensordot", "vecdot", "matrix_transpose"):
    case(f"linalg.{_name}", *((SQUARE[0], SQUARE[1])[: 1 if _name == "matrix_transpose" else 2]))
for _options in ({}, {"n": 3, "norm": "ortho"}, {"n": 8, "axis": -2, "norm": "forward"}):
    for _name in ("fft", "ifft", "irfft", "hfft"):
        case(f"fft.{_name}", TALL, function=lambda xp, x, f=_name, o=_options: getattr(xp.fft, f)(x + 2j * x * x, **o))
    for _name in ("rfft", "ihfft"):
        case(f"fft.{_name}", TALL, **_options)
for _options in ({}, {"s": (4, 3), "norm": "ortho", "axes": (-2, -1)}, {"axes": (1,)}):
    for _name in ("fftn", "ifftn", "irfftn"):
        case(f"fft.{_name}", TALL, function=lambda xp, x, f=_name, o=_options: getattr(xp.fft, f)(x + 2j * x * x, **o))
    case("fft.rfftn", TALL, **_options)
for _name in ("fftshift", "ifftshift"):
    case(f"fft.{_name}", TALL)
    case(f"fft.{_name}", TALL, axes=-1)
COMPLEX = {
    "elementwise": lambda xp, x, y: xp.abs(xp.exp(1j * x) * y + xp.conj(xp.sqrt(x + 2j))) + xp.imag(x * y / (x + 1j)),
    "powers": lambda xp, x, y: (x + 1j) ** 3 + (y + 1j) ** x + 2.0 ** (x * 1j),
    "products": lambda xp, x, y: xp.vecdot(x + 1j * y, y * (2 - 1j) * x),
    "scalars": lambda xp, x, y: 2j**x + (1 - 2j) ** (x + 1j * y) + (x + 1j) ** (0.5 - 1j) + xp.asinh(x * x + 1j * y),
    "variances": lambda xp, x, y: xp.var(x + 1j * x * x, axis=0) + xp.std(x * y - 2j * y, correction=1),
    "parts": lambda xp, x, y: xp.real(xp.conj(x + 1j * y) * (x - 2j)) * xp.imag((y + 1j) ** 2),
    "matrices": lambda xp, x, y: xp.linalg.inv(xp.matmul(xp.matrix_transpose(x), y + 1j * x)) * xp.linalg.det(x.T @ x),
}
CASES += [(f"complex {name}", function, (TALL[0], TALL[1])) for name, function in COMPLEX.items()]


def weighted(xp: Any, outputs: Any) -> Any:
    """Return a sum of all elements and of their squares, with other weights for each."""
    total: Any = 0.0
    for y in outputs if isinstance(outputs, tuple) else (outputs,):
        y = 1.3 * xp.real(y) + xp.imag(y) * xp.imag(y) if is_complex(y.dtype) else y
        weights = xp.asarray(np.cos(np.arange(np.prod(y.shape))).reshape(y.shape).astype(str(y.dtype).split(".")[-1]))
        total = total + xp.sum(weights * y * y) + 0.5 * xp.sum(weights * y)
    return total


def gradients(function: Any, *inputs: Any) -> Any:
    def compute(*x: Any) -> Any:
        return weighted(array_namespace(*x), function(array_namespace(*x), *x))

    return xf.grad(compute, range(len(inputs)))(*inputs)


def close(actual: Any, expected: Any, tolerance: float) -> None:
    for x, y in zip(actual, expected, strict=True):
        x, y = to_host(x), np.asarray(y)
        assert x.dtype == y.dtype
        np.testing.assert_allclose(x, y, rtol=0.0, atol=tolerance * (1.0 + np.max(np.abs(y))))


def slope(grad: Any, xp_of: Any, function: Any, *inputs: Any) -> Any:
    """Return the derivative of the sum of the squares of a derivative with respect to the first input."""

    def first(x: Any) -> Any:
        xp = xp_of(x)
        g = grad(lambda x: weighted(xp_of(x), function(xp_of(x), x, *inputs[1:])))(x)
        return xp.sum(g * g)

    return grad(first)(inputs[0])


@for_each("name, function, inputs", CASES)
def test_derivatives_are_those_of_torch(name, function, inputs):
    func, xp = pytest.importorskip("torch").func, library_or_skip("torch")
    tensors = [from_host(xp, x) for x in inputs]
    expected = func.grad(lambda *x: weighted(xp, function(xp, *x)), tuple(range(len(inputs))))(*tensors)
    close(gradients(function, *inputs), expected, 1e-10)
    expected = slope(func.grad, lambda x: xp, function, *tensors)
    close([slope(xf.grad, array_namespace, function, *inputs)], [expected], 1e-8)


@for_each("name, function, inputs", [*CASES[:: len(COMPLEX)], *CASES[-len(COMPLEX) :]])  # JAX compiles each operation
def test_derivatives_are_those_of_jax(name, function, inputs):
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    with jax.enable_x64():
        reference = jax.grad(lambda *x: weighted(jnp, function(jnp, *x)), tuple(range(len(inputs))))
        expected = reference(*map(jnp.asarray, inputs))
    close(gradients(function, *inputs), expected, 1e-10)


@for_each("library", ["torch", "array_api_strict"])
@for_each("name, function, inputs", CASES)
def test_derivatives_on_other_libraries(library, name, function, inputs):
    xp = library_or_skip(library)
    if name in ("linalg.svd", "linalg.qr", "linalg.eigh"):
        pytest.skip("signs of vectors differ")
    close(gradients(function, *(from_host(xp, x) for x in inputs)), gradients(function, *inputs), 1e-9)


@for_each("name, function, inputs", CASES[::3])
def test_programs(name, function, inputs):
    compute = xf.jit(lambda *x: gradients(function, *x))
    for _ in range(3):
        for x, y in zip(compute(*inputs), gradients(function, *inputs), strict=True):
            np.testing.assert_array_equal(x, y)


def test_gradients_of_complex_inputs_are_those_of_jax():
    jax = pytest.importorskip("jax")
    z = TALL[0] + 1j * TALL[1]

    def compute(xp: Any, z: Any, direction: Any) -> Any:
        return xp.sum(xp.abs(z) ** 3) + xp.sum(xp.real(z * z * direction))

    with jax.enable_x64():  # which takes the sign of a complex number for a constant
        expected = jax.grad(lambda z: compute(jax.numpy, z, z / abs(z)))(jax.numpy.asarray(z))
    close([xf.grad(lambda z: compute((xp := array_namespace(z)), z, xp.sign(z)))(z)], [expected], 1e-12)


def test_a_vector_of_zeros_has_the_derivative_zero():
    for order in (1, 2, 3, INF):
        norm = lambda x, order=order: array_namespace(x).linalg.vector_norm(x, ord=order)  # noqa: E731
        assert not xf.grad(norm)(np.zeros(3)).any()


@for_each(
    "name, matrix",
    [
        *((name, np.eye(3)) for name in ("eigvalsh", "svdvals", "nuc", "det")),
        *((name, np.diag([2.0, 1.0, 1.0])) for name in ("first", "largest", "vector")),
        *((name, np.diag([3.0, 0.0, 0.0, 1.0])[:, :columns]) for name in ("largest", "left") for columns in (3, 4)),
        ("largest", np.diag([3.0, 0.0, 0.0, 1.0])[:3]),
        *(
            ("det", matrix)
            for matrix in (np.arange(9.0).reshape(3, 3), np.zeros((2, 2)), np.stack([np.ones((2, 2))] * 2))
        ),
        ("det", np.ones((2, 2)) + 0j),
    ],
)
def test_what_has_a_derivative_at_equal_values_and_singular_matrices(name, matrix):
    linalg = {
        "eigvalsh": lambda xp, x: xp.sum(xp.linalg.eigvalsh(x)),
        "svdvals": lambda xp, x: xp.sum(xp.linalg.svdvals(x)),
        "nuc": lambda xp, x: xp.linalg.matrix_norm(x, ord="nuc"),
        "det": lambda xp, x: xp.sum(xp.real(xp.linalg.det(x))),
        "first": lambda xp, x: xp.linalg.eigh(x)[0][2],
        "largest": lambda xp, x: xp.linalg.matrix_norm(x, ord=2),
        "vector": lambda xp, x: xp.linalg.eigh(x)[1][0, 2] + xp.sum(xp.linalg.eigh(x)[1][:, 2] ** 3),
        "left": lambda xp, x: xp.sum(xp.linalg.svd(x, full_matrices=False)[0][:, 0] ** 3),
    }[name]
    step = 1e-5 * np.random.default_rng(0).standard_normal(matrix.shape)
    step = step + np.swapaxes(step, -1, -2) if name in ("eigvalsh", "first", "vector") else step
    expected = linalg(np, matrix + step) - linalg(np, matrix - step)
    gradient = xf.grad(lambda x: linalg(array_namespace(x), x))(matrix)
    np.testing.assert_allclose(2.0 * np.real(np.sum(gradient * step)), expected, rtol=1e-7, atol=1e-12)


def test_every_function_of_the_extensions_has_a_case():
    names = {f"linalg.{name}" for name in array_api_strict.linalg.__all__ if name.islower()}
    names |= {f"fft.{name}" for name in array_api_strict.fft.__all__}
    rules = {name for name in (*RULES, *DECOMPOSITIONS, *OUTPUT_RULES) if name.startswith(("linalg.", "fft."))}
    assert {name for name, *_ in CASES if "." in name} >= rules
    assert names - rules - NOT_DIFFERENTIABLE - {name for name, *_ in CASES} == set()


@for_each(
    "name, compute, message",
    [
        ("qr", lambda xp, x: xp.linalg.qr(x.T)[0], "linalg.qr of 3 x 5 matrices has no derivative rule"),
        ("svd", lambda xp, x: xp.linalg.svd(x)[0], "svd has a derivative rule with full_matrices=False"),
        ("complex", lambda xp, x: xp.linalg.svdvals(x + 1j * x), "linalg.svd of complex matrices has no derivative"),
    ],
)
def test_what_has_no_rule_says_so_by_its_name(name, compute, message):
    with raises_line(DifferentiationError, message):
        gradients(compute, TALL[0])
