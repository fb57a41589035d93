"""Derivatives where formulas fail: infinities, zeros, ties, tiny and huge float32, empty and one-element axes.

The expected values are those of torch. Where it has NaN, or a finite value that is not the limit, `CHOSEN` has the
limit, or a finite value in its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.reference import for_each
from xformer import grad, vjp
from xformer.backends import array_namespace, extra, from_host, resolve, to_host
from xformer.tracing.rule import DECOMPOSITIONS, RULES, SEQUENCE_RULES

torch = pytest.importorskip("torch", reason="it has the expected values")

INF = math.inf
POINTS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0, 100.0, -100.0, INF, -INF]
POINTS += [1e-40, -1e-40, 1e-30, 1e20, -1e20, 3e38, -3e38]  # subnormal and huge in float32
# Quotients that round to the next integer: NumPy has 1 % 0.1 = 0.1 - 1e-17, so the quotient is 9, not 10.
ROUNDED = [(1.0, 0.1), (0.3, 0.1), (-0.3, 0.1), (0.6, 0.2), (7.0, 0.7), (4.2, -0.6), (1e8, 0.3)]

ONE: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in (
        *("negative", "positive", "abs", "square", "sqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2"),
        *("log10", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
        *("erf", "sign"),
    )
} | {"conj": torch.positive, "real": torch.positive}
TWO: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in (
        *("add", "subtract", "multiply", "divide", "remainder", "atan2", "hypot", "logaddexp", "pow"),
        *("maximum", "minimum", "copysign"),
    )
} | {"nextafter": lambda a, b: a + 0.0 * torch.zeros_like(b).copysign(b)}


# --- values that torch lacks ------------------------------------------------------------------------------------------


def unit(a: Any, b: Any) -> Any:
    """The derivative of hypot: the direction of a point; zero at the origin, by convention."""
    is_far = np.isinf(a) | np.isinf(b)
    a, b = (np.where(is_far, np.where(np.isinf(x), np.sign(x), 0.0), x) for x in (a, b))
    return np.where((a == 0.0) & (b == 0.0), 0.0, a / np.hypot(a, b))


def angle(a: Any, b: Any) -> Any:
    """The derivative of atan2: zero at the origin, by convention."""
    radius = np.hypot(a, b)
    return np.where(radius == 0.0, 0.0, unit(b, a) / radius)


def share(a: Any, b: Any) -> Any:
    """The derivative of logaddexp: equal infinities share, as other equal numbers do."""
    return np.where(a == b, 0.5, 1.0 / (1.0 + np.exp(b - a)))


def always(*inputs: Any) -> Any:
    return np.ones(inputs[0].shape, bool)


# By function and input: where, and what, as functions of the inputs in float64.
CHOSEN: dict[tuple[str, int], tuple[Callable[..., Any], Callable[..., Any]]] = {
    ("asinh", 0): (lambda x: np.abs(x) > 1e18, lambda x: 1.0 / np.abs(x)),  # torch: zero
    ("acosh", 0): (lambda x: x > 1e18, lambda x: 1.0 / x),
    ("hypot", 0): (always, unit),  # torch: NaN at the origin and infinity, zero where it overflows
    ("hypot", 1): (always, lambda a, b: unit(b, a)),
    ("atan2", 0): (always, angle),  # torch: NaN at infinity, zero where squares overflow or underflow
    ("atan2", 1): (always, lambda a, b: -angle(b, a)),
    ("logaddexp", 0): (lambda a, b: a == b, share),  # torch: NaN for infinities
    ("logaddexp", 1): (lambda a, b: a == b, lambda a, b: share(b, a)),
    # torch: NaN at infinity, where copysign is plus or minus the identity
    ("copysign", 0): (lambda a, b: np.isinf(a), lambda a, b: np.sign(a) * np.copysign(1.0, b)),
    ("copysign", 1): (always, lambda a, b: np.zeros_like(a)),
    # torch: NaN for negative bases, whose powers have no derivative with respect to the exponent, and for inf * 0
    ("pow", 0): (lambda a, b: np.isinf(b) & (a**b == 0.0), lambda a, b: np.zeros_like(a)),
    ("pow", 1): (lambda a, b: (a < 0.0) | (np.isinf(a) & (b < 0.0)), lambda a, b: np.zeros_like(a)),
    ("nextafter", 1): (always, lambda a, b: np.zeros_like(a)),
}


def expected(name: str, function: Callable[..., Any], inputs: tuple[Any, ...]) -> list[Any]:
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    function(*tensors).sum().backward()
    results = []
    for position, tensor in enumerate(tensors):
        value = np.zeros_like(inputs[position]) if tensor.grad is None else tensor.grad.numpy()
        where, chosen = CHOSEN.get((name, position), (lambda *_: False, lambda *_: 0.0))
        wide = [x.astype(np.float64) for x in inputs]
        results.append(np.where(where(*wide), chosen(*wide), value).astype(value.dtype))
    return results


def grid(name: str) -> list[tuple[float, ...]]:
    pairs = list(itertools.product(POINTS, POINTS)) + (ROUNDED if name == "remainder" else [])
    return [(x,) for x in POINTS] if name in ONE else pairs


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@for_each("library", [np, torch])
@for_each("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", [*ONE, *TWO])
def test_elementwise_derivatives_at_special_points(name: str, dtype: str, library: Any):
    inputs = tuple(np.asarray(column, dtype) for column in zip(*grid(name), strict=True))
    arrays = [from_host(array_namespace(library.zeros(1)), x) for x in inputs]
    function = extra.erf if name == "erf" else lambda *arrays: getattr(array_namespace(*arrays), name)(*arrays)
    value, pull = vjp(function, *arrays)
    derivatives = [to_host(cotangent) for cotangent in pull(array_namespace(value).ones_like(value))]
    is_defined = ~np.isnan(to_host(value))  # outside the domain, anything goes
    for actual, wanted in zip(derivatives, expected(name, (ONE | TWO)[name], inputs), strict=True):
        failed = is_defined & ~np.isclose(actual, wanted, rtol=1e-5, atol=1e-38, equal_nan=True)
        assert [*zip(*(x[failed] for x in (*inputs, actual, wanted)), strict=True)] == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@for_each("name", TWO)
def test_numbers_have_the_special_points_of_arrays(name: str):
    def apply(a: Any, b: Any) -> Any:
        return getattr(array_namespace(*(x for x in (a, b) if not isinstance(x, float))), name)(a, b)

    x, ones = np.asarray(POINTS), np.ones(len(POINTS))
    for number in (0.0, -1.0, 2.0, INF, -INF):
        array = np.full(x.shape, number)
        first, _ = vjp(apply, x, array)[1](ones)
        _, second = vjp(apply, array, x)[1](ones)
        np.testing.assert_array_equal(vjp(lambda a, b=number: apply(a, b), x)[1](ones)[0], first)
        np.testing.assert_array_equal(vjp(lambda b, a=number: apply(a, b), x)[1](ones)[0], second)


# --- functions of whole arrays: ties, infinities, empty and one-element axes ------------------------------------------

TIES = np.asarray([[3.0, 3.0, -1.0], [INF, 0.0, INF], [-INF, -INF, -0.0], [1e-40, 3e38, 1.0]], np.float32)
ZEROS = np.asarray([[2.0, 0.0, 3.0], [0.0, 0.0, 5.0], [1e-40, 1e20, 1e20]], np.float32)
EQUAL = np.full((2, 3), 1.5, np.float32)
EMPTY, NO_COLUMNS = np.zeros((0, 3), np.float32), np.zeros((3, 0), np.float32)
ONE_ELEMENT, SCALAR = np.asarray([[4.0]], np.float32), np.asarray(2.0, np.float32)
FEW = (TIES, EMPTY, NO_COLUMNS, ONE_ELEMENT)

Function = Callable[..., Any]
CASES: list[
    tuple[str, Function, tuple[Any, ...], Function | None]
] = []  # the last item is torch's version, if it differs


def case(name: str, function: Function, *many: Any, torch_function: Function | None = None) -> None:
    """Add a case for each of `many` inputs, which are arrays, or tuples of the arrays of a call."""
    CASES.extend((name, function, x if isinstance(x, tuple) else (x,), torch_function) for x in many)


for _name in ("sum", "mean"):
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), *FEW, SCALAR)
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=0), *FEW)
for _name in ("max", "min"):
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x), TIES, EQUAL, ONE_ELEMENT, SCALAR)
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=1), TIES, EMPTY, EQUAL, ONE_ELEMENT)
for _name in ("prod", "cumulative_prod", "cumulative_sum"):
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=1), ZEROS, *FEW[1:])
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=0), ZEROS, *FEW[1:])
for _name in ("cumulative_prod", "cumulative_sum"):
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=1, include_initial=True), ZEROS, *FEW[1:])
for _name in ("var", "std"):
    case(_name, lambda xp, x, f=_name: getattr(xp, f)(x, axis=-1), EQUAL, ONE_ELEMENT, EMPTY, EQUAL + ZEROS[:2, :])
case(
    "clip",
    lambda xp, x: xp.clip(x, -1.0, 3.0),
    *FEW,
    # At a bound, half of the gradient, as in JAX; torch's own clip gives all of it.
    torch_function=lambda xp, x: xp.minimum(xp.maximum(x, xp.asarray(-1.0)), xp.asarray(3.0)),
)
case("where", lambda xp, a, b: xp.where(a > b, a, b), (TIES, TIES[::-1]), (EMPTY, EMPTY), (SCALAR, ONE_ELEMENT))
case("sort", lambda xp, x: xp.sort(x, axis=-1), *FEW)
case("diff", lambda xp, x: xp.diff(x, axis=1), ZEROS, *FEW[1:])
case("diff", lambda xp, x: xp.diff(x, axis=0, n=2), ZEROS, ONE_ELEMENT, EMPTY)

PAIRS = [(EMPTY, ZEROS), (NO_COLUMNS, EMPTY), (ONE_ELEMENT, ONE_ELEMENT), (EMPTY[:, :0], EMPTY[:0].T[:0])]
case("matmul", lambda xp, a, b: xp.matmul(a, b), *PAIRS)
case(
    "matmul",
    lambda xp, a, b: xp.matmul(a, b),
    (NO_COLUMNS[0], NO_COLUMNS[0]),
    (EMPTY, ZEROS[0]),
    (ZEROS[0], NO_COLUMNS),
)
case("vecdot", lambda xp, a, b: xp.vecdot(a, b), (ZEROS, ZEROS), (EMPTY, EMPTY), (NO_COLUMNS, NO_COLUMNS))
case("tensordot", lambda xp, a, b: xp.tensordot(a, b, axes=1), *PAIRS)
case("tensordot", lambda xp, a, b: xp.tensordot(a, b, axes=2), (EMPTY, EMPTY), (ONE_ELEMENT, ONE_ELEMENT))

for _name, _function in {
    "reshape": lambda xp, x: xp.reshape(x, x.shape[::-1]),
    "expand_dims": lambda xp, x: xp.expand_dims(x, axis=1),
    "squeeze": lambda xp, x: xp.squeeze(x[None, ...], axis=0),
    "broadcast_to": lambda xp, x: xp.broadcast_to(x, (2, *x.shape)),
    "broadcast_arrays": lambda xp, x: xp.broadcast_arrays(x, xp.zeros((1, 1), dtype=x.dtype))[0],
    "flip": lambda xp, x: xp.flip(x, axis=1),
    "matrix_transpose": lambda xp, x: xp.matrix_transpose(x),
    "moveaxis": lambda xp, x: xp.moveaxis(x, 0, 1),
    "permute_dims": lambda xp, x: xp.permute_dims(x, (1, 0)),
    "tril": lambda xp, x: xp.tril(x),
    "triu": lambda xp, x: xp.triu(x, k=1),
    "astype": lambda xp, x: xp.astype(x, xp.float32),
    "asarray": lambda xp, x: xp.asarray(x, dtype=xp.float32),
    "full_like": lambda xp, x: x * xp.full_like(x, 2.0),
    "roll": lambda xp, x: xp.roll(x, 1, axis=0) + xp.roll(x, 2),
    "tile": lambda xp, x: xp.tile(x, (2, 1)),
    "repeat": lambda xp, x: xp.repeat(x, 2, axis=1),
    "concat": lambda xp, x: xp.concat([x, x[:0, :], x], axis=0),
    "stack": lambda xp, x: xp.stack([x, x], axis=1),
    "meshgrid": lambda xp, x: xp.meshgrid(xp.reshape(x, (-1,)), xp.reshape(x, (-1,)))[0],
    "getitem": lambda xp, x: x[..., :0] if x.shape[0] else x[:, None],
}.items():
    case(_name, _function, *FEW)
case("tile", lambda xp, x: xp.tile(x, (0,)), *FEW)
case("repeat", lambda xp, x: xp.repeat(x, 0), *FEW, SCALAR)
case("getitem", lambda xp, x: x[()] * x[...], ZEROS, EMPTY, SCALAR)
case("getitem", lambda xp, x: x[xp.asarray([0, 0])], TIES, NO_COLUMNS, ONE_ELEMENT)
case("unstack", lambda xp, x: xp.unstack(x, axis=1)[0], TIES, EMPTY, ONE_ELEMENT)
case("to_device", lambda xp, x: x.to_device("cpu"), *FEW, torch_function=lambda xp, x: +x)
case("from_dlpack", lambda xp, x: xp.from_dlpack(x), *FEW, torch_function=lambda xp, x: +x)
case("take", lambda xp, x: xp.take(x, xp.asarray([0, 0]), axis=0), TIES, NO_COLUMNS, ONE_ELEMENT)
case("take", lambda xp, x: xp.take(x, xp.zeros((0,), dtype=xp.int32), axis=0), *FEW)
case("take_along_axis", lambda xp, x: xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1), *FEW)


def written(xp: Any, x: Any) -> Any:
    copy = xp.asarray(x, copy=True)
    copy[:, :1] = 7.0
    copy[:0, ...] = x[:0, ...]
    return copy


case("setitem", written, *FEW, torch_function=lambda xp, x: xp.where(xp.arange(x.shape[1]) < 1, 7.0, x))
case(
    "scatter_add",
    lambda xp, x: extra.scatter_add(x, xp.zeros((2,), dtype=xp.int32), xp.stack([x[0, ...], x[0, ...]])),
    *(TIES, NO_COLUMNS, ONE_ELEMENT),
)
for _name in ("unique_all", "unique_counts", "unique_inverse", "unique_values"):
    case(
        _name,
        lambda xp, x, f=_name: xp.unique_values(x) if f == "unique_values" else getattr(xp, f)(x)[0],
        *(np.asarray([3.0, 3.0, -INF, 0.0, INF, INF], np.float32), EMPTY, ONE_ELEMENT),
        torch_function=lambda xp, x: x.reshape(-1)[
            np.unique(x.detach().numpy(), return_index=True)[1]
        ],  # the first ones
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")
@for_each("name, function, inputs, other", CASES)
def test_derivatives_at_ties_and_of_empty_axes(name: str, function: Function, inputs: Any, other: Function | None):
    value, pull = vjp(lambda *arrays: function(array_namespace(*arrays), *arrays), *inputs)
    g = np.arange(1.0, value.size + 1.0, dtype=np.float32).reshape(value.shape)
    tensors = [torch.tensor(np.array(x), requires_grad=True) for x in inputs]
    result = (other or function)(array_namespace(*tensors), *tensors)
    assert result.shape == value.shape
    for actual, wanted in zip(pull(g), torch.autograd.grad(result, tensors, torch.tensor(g)), strict=True):
        np.testing.assert_allclose(actual, wanted.numpy(), rtol=1e-5, atol=1e-30)


@for_each(
    "name, library", [("sort", "torch"), *itertools.product(("cumulative_sum", "cumulative_prod"), ("numpy", "torch"))]
)
def test_a_number_has_the_only_axis(name: str, library: str):
    x = from_host(resolve(library), np.asarray(2.0))

    def cube(x: Any) -> Any:
        xp = array_namespace(x)
        return xp.sum(getattr(xp, name)(x, axis=-1) ** 3)

    assert (float(grad(cube)(x)), float(grad(grad(cube))(x))) == (12.0, 12.0)


def test_every_rule_has_special_points():
    tested = {*ONE, *TWO, *(name for name, *_ in CASES)}
    known = {*RULES, *SEQUENCE_RULES, *DECOMPOSITIONS, "unstack"}
    assert {name for name in known if "." not in name} == {*tested, "imag", "top_k"}  # zero, and in no library yet
