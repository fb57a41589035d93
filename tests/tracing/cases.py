"""The table of derivatives to check: for every rule and operation, the ways in which it is called.

`row(name, function, *inputs)` adds a row for the rule `name`: `function(xp, *inputs)` is differentiated with respect
to all inputs, float64 arrays drawn by `draw` unless they are given. Functions take everything from `xp`, so that the
rows run on every library (test_libraries.py); those of `numpy_row` mix in plain NumPy arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from xformer import ops
from xformer.backends import extra
from xformer.layers import Linear
from xformer.ops.activations import gated
from xformer.tree import with_fields


class Row(NamedTuple):
    name: str
    function: Callable[..., Any]
    inputs: tuple[Any, ...]
    numpy_only: bool = False

    def __str__(self) -> str:
        return f"{self.name}-{'-'.join('x'.join(map(str, x.shape)) or 'scalar' for x in self.inputs)}"


ROWS: list[Row] = []
_COUNT = itertools.count()


def draw(*shape: int, low: float = -2.0, high: float = 2.0) -> Any:
    """Values in [low, high), evenly spread and in random order: no two are close, so maxima and orders are safe."""
    size = int(np.prod(shape))
    generator = np.random.default_rng(abs(hash((shape, low, high, next(_COUNT)))) % 2**32)
    values = low + (high - low) * (generator.permutation(size) + generator.uniform(0.3, 0.7, size)) / max(size, 1)
    return values.reshape(shape)


def row(name: str, function: Callable[..., Any], *inputs: Any) -> None:
    ROWS.append(Row(name, function, tuple(draw(*x) if isinstance(x, tuple) else x for x in inputs)))


def numpy_row(name: str, function: Callable[..., Any], *inputs: Any) -> None:
    """Return a row whose function mixes traced arrays with plain ones of NumPy."""
    row(name, function, *inputs)
    ROWS[-1] = ROWS[-1]._replace(numpy_only=True)


def arrays(xp: Any, key: Any) -> Any:
    """Turn the NumPy arrays in an index into arrays of the namespace."""
    if isinstance(key, tuple):
        return tuple(arrays(xp, item) for item in key)
    return xp.asarray(key) if isinstance(key, np.ndarray) else key


# --- elementwise, one array ------------------------------------------------------------------------------------------

ANYWHERE = ["negative", "positive", "conj", "real", "abs", "square", "exp", "expm1", "sin", "cos", "tan",
            "atan", "sign", "sinh", "cosh", "tanh", "asinh", "reciprocal"]  # fmt: skip
for _name in ANYWHERE:
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(x), draw(3, 4, low=-1.4, high=1.4))
for _name in ("sqrt", "log", "log1p", "log2", "log10"):
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(x), draw(3, 4, low=0.2, high=3.0))
for _name in ("asin", "acos", "atanh"):
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(x), draw(3, 4, low=-0.9, high=0.9))
row("acosh", lambda xp, x: xp.acosh(x), draw(3, 4, low=1.2, high=3.0))
row("imag", lambda xp, x: xp.imag(x * x * (1 + 2j)), (3, 4))
row("negative", lambda xp, x: -x, (3,))
row("positive", lambda xp, x: +x, (3,))
row("abs", lambda xp, x: abs(x), (5,))
row("exp", lambda xp, x: xp.exp(x), ())
row("square", lambda xp, x: xp.square(x), (0, 3))

# --- elementwise, two arrays: broadcasting either way, both sides the same array, scalars on either side -------------

BROADCAST = [((3, 4), (3, 4)), ((3, 4), (4,)), ((4,), (3, 4)), ((3, 1), (1, 4)), ((2, 1, 3), (4, 1)), ((), (3,)),
             ((1,), ()), ((0, 3), (3,))]  # fmt: skip
TWO = {
    "add": lambda xp, a, b: xp.add(a, b),
    "subtract": lambda xp, a, b: xp.subtract(a, b),
    "multiply": lambda xp, a, b: xp.multiply(a, b),
    "maximum": lambda xp, a, b: xp.maximum(a, b),
    "minimum": lambda xp, a, b: xp.minimum(a, b),
    "logaddexp": lambda xp, a, b: xp.logaddexp(a, b),
    "divide": lambda xp, a, b: xp.divide(a, b + 3.0),
    "atan2": lambda xp, a, b: xp.atan2(a, b),
    "hypot": lambda xp, a, b: xp.hypot(a, b),
    "copysign": lambda xp, a, b: xp.copysign(a, b),
    "remainder": lambda xp, a, b: xp.remainder(a, b * 0.1 + 1.3),
    "nextafter": lambda xp, a, b: xp.nextafter(a, b),
    "pow": lambda xp, a, b: xp.pow(a + 2.5, b),
}
for _name, _function in TWO.items():
    for _first, _second in BROADCAST:
        row(_name, _function, draw(*_first), draw(*_second, low=-1.7, high=1.9))
    row(_name, lambda xp, x, f=_function: f(xp, x, x * 0.5 + 0.3), (3,))

row("add", lambda xp, x: (x + 1.5) + (2 + x), (3,))
row("subtract", lambda xp, x: (x - 1.5) * (2 - x), (3,))
row("multiply", lambda xp, x: (x * 1.5) + (2 * x) + x * x, (3,))
row("divide", lambda xp, x: x / 1.5 + 2 / x, draw(3, low=0.5, high=2.0))
row("divide", lambda xp, a, b: a / b, (3, 1), draw(4, low=0.5, high=2.0))
row("remainder", lambda xp, x: x % 0.7 + 5.0 % (x + 4.0), (3,))
row("pow", lambda xp, x: x**2 + x**3 + x**0 + x**1, (5,))
row("pow", lambda xp, x: xp.pow(x, 2) + xp.pow(x, 2.5) + 1.7**x, draw(5, low=0.3, high=2.0))
row("pow", lambda xp, x: xp.pow(2.0, x) + x**-1, draw(5, low=0.3, high=2.0))
row("pow", lambda xp, x: x**2 + x**1, np.zeros(3))
row("pow", lambda xp, x: x ** xp.asarray([2.0, 1.0, 0.0, 3.0], dtype=xp.float64), np.asarray([0.0, 0.0, 0.0, -1.5]))
for _name in ("maximum", "minimum", "hypot", "atan2", "logaddexp", "copysign", "pow", "remainder"):
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(x, 0.71) + getattr(xp, f)(0.71, x), draw(6, low=0.2, high=2.0))
numpy_row("add", lambda xp, x: np.ones((2, 3)) + x + np.float64(2.0) * x, (3,))
numpy_row("multiply", lambda xp, x: np.asarray(2.0) * x * np.ones((2, 1)), (3,))
numpy_row("subtract", lambda xp, a, b: a - np.ones(3) - (np.ones(3) - b), (2, 3), (3,))

CONDITION = np.asarray([[True, False, True], [False, True, False]])
row("where", lambda xp, a, b: xp.where(xp.asarray(CONDITION), a, b), (2, 3), (2, 3))
row("where", lambda xp, a, b: xp.where(xp.asarray(CONDITION), a, b), (3,), (2, 1))
row("where", lambda xp, a, b: xp.where(a > b, a * a, b), (2, 3), (2, 3))
row(
    "where", lambda xp, x: xp.where(xp.asarray(CONDITION), x, 1.5) + xp.where(xp.asarray(CONDITION), 0.0, x * x), (2, 3)
)
numpy_row("where", lambda xp, a: xp.where(CONDITION[0], a, np.ones((2, 3))), (3,))
row("clip", lambda xp, x: xp.clip(x, -1.0, 1.0), (8,))
row("clip", lambda xp, x: xp.clip(x * x, 1.0) + xp.clip(x, max=0.5), (8,))
row("clip", lambda xp, x, low, high: xp.clip(x, low, high), (3, 4), draw(4, low=-1.5, high=-1.0), draw(3, 1, low=1.0))

# --- reductions ------------------------------------------------------------------------------------------------------

AXES: list[dict[str, Any]] = [{}, {"axis": 0}, {"axis": -1}, {"axis": (0, 2)}, {"axis": (-1, 1), "keepdims": True},
                              {"axis": 1, "keepdims": True}, {"keepdims": True}]  # fmt: skip
for _name in ("sum", "mean", "max", "min", "prod", "var", "std"):
    for _static in AXES:
        row(_name, lambda xp, x, f=_name, s=_static: getattr(xp, f)(x * 1.0, **s), (2, 3, 4))
row("sum", lambda xp, x: xp.sum(x * x, axis=()), (2, 3))
row("sum", lambda xp, x: xp.sum(x * x, dtype=xp.float64), (3,))
row("sum", lambda xp, x: xp.sum(x * x), ())
row("var", lambda xp, x: xp.var(x, axis=0, correction=1.0), (4, 3))
row("std", lambda xp, x: xp.std(x, axis=-1, correction=1, keepdims=True), (4, 3))
row("prod", lambda xp, x: xp.prod(x, axis=0), np.asarray([[0.0, 1.0, 0.0], [2.0, 3.0, 0.0], [4.0, 0.0, 5.0]]))
row("prod", lambda xp, x: xp.prod(x, axis=1), np.asarray([[0.0, 1.0, 0.5], [0.0, 0.0, 1.5], [2.0, 2.0, 2.0]]))
row("prod", lambda xp, x: xp.prod(x, dtype=xp.float64), (1,))
row("prod", lambda xp, x: xp.prod(x, axis=0), (0, 3))
for _name in ("cumulative_sum", "cumulative_prod"):
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(x * x), (4,))
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(x * x, axis=1), (2, 3, 2))
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(x * x, axis=-2, include_initial=True), (2, 3, 2))
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(x * x, dtype=xp.float64), (1,))
row("cumulative_prod", lambda xp, x: xp.cumulative_prod(x), np.asarray([2.0, 0.0, 3.0, 0.0, 1.0]))

# --- linear algebra --------------------------------------------------------------------------------------------------

PRODUCTS = [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((2, 3), (3, 4)), ((5, 2, 3), (3,)), ((3,), (5, 3, 2)),
            ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)), ((5, 2, 3), (5, 3, 4)), ((6, 1, 2, 3), (5, 3, 4)),
            ((1, 2, 3), (6, 5, 3, 4)), ((0, 3), (3, 2))]  # fmt: skip
for _first, _second in PRODUCTS:
    row("matmul", lambda xp, a, b: xp.matmul(a, b), draw(*_first), draw(*_second))
numpy_row("matmul", lambda xp, a, b: a @ b @ np.ones((4, 2)), (2, 3), (3, 4))
numpy_row("matmul", lambda xp, x: np.ones((4, 2)) @ x @ x.T, (2, 3))
row("matrix_transpose", lambda xp, x: xp.matrix_transpose(x) * 2.0 + x.mT, (2, 3, 4))
row("matrix_transpose", lambda xp, x: x.T, (3, 4))
row("vecdot", lambda xp, a, b: xp.vecdot(a, b), (2, 3), (3,))
row("vecdot", lambda xp, a, b: xp.vecdot(a, b, axis=-2), (2, 3, 4), (3, 4))
row("tensordot", lambda xp, a, b: xp.tensordot(a, b), (2, 3, 4), (3, 4, 5))
row("tensordot", lambda xp, a, b: xp.tensordot(a, b, axes=0), (2,), (3,))
row("tensordot", lambda xp, a, b: xp.tensordot(a, b, axes=([0, -1], [1, 0])), (2, 3, 4), (4, 2, 5))

# --- shape and order -------------------------------------------------------------------------------------------------

row("reshape", lambda xp, x: xp.reshape(x, (4, 6)) * 2.0, (2, 3, 4))
row("reshape", lambda xp, x: xp.reshape(x, shape=(-1,), copy=True), (2, 3))
row("expand_dims", lambda xp, x: xp.expand_dims(x, axis=1) + xp.expand_dims(x, axis=-2), (2, 3))
row("expand_dims", lambda xp, x: xp.expand_dims(x, axis=0), ())
row("squeeze", lambda xp, x: xp.squeeze(x, axis=1), (2, 1, 3, 1))
row("squeeze", lambda xp, x: xp.squeeze(x, axis=(1, -1)), (2, 1, 3, 1))
row("squeeze", lambda xp, x: xp.squeeze(x, 0), (1, 3))
row("broadcast_to", lambda xp, x: xp.broadcast_to(x, (4, 2, 3)), (2, 1))
row("broadcast_to", lambda xp, x: xp.broadcast_to(x, shape=(2, 0)), (1,))
row("broadcast_arrays", lambda xp, a, b: xp.broadcast_arrays(a, b), (2, 1), (3,))
row("flip", lambda xp, x: xp.flip(x) * 2.0 + xp.flip(x, axis=1) + xp.flip(x, axis=(0, -1)), (2, 3))
row("moveaxis", lambda xp, x: xp.moveaxis(x, 0, -1), (2, 3, 4))
row("moveaxis", lambda xp, x: xp.moveaxis(x, (0, 2), (1, 0)), (2, 3, 4))
row("permute_dims", lambda xp, x: xp.permute_dims(x, (2, 0, 1)), (2, 3, 4))
row("permute_dims", lambda xp, x: xp.permute_dims(x, axes=(-1, 0, -2)), (2, 3, 4))
row("roll", lambda xp, x: xp.roll(x, 2) + xp.roll(x, -1, axis=1), (3, 4))
row("roll", lambda xp, x: xp.roll(x, (1, -2), axis=(0, 1)), (3, 4))
row("roll", lambda xp, x: xp.roll(x, shift=1, axis=-1), (3, 4))
row("tile", lambda xp, x: xp.tile(x, (2, 3)), (2, 2))
row("tile", lambda xp, x: xp.tile(x, (3,)), (2, 2))
row("tile", lambda xp, x: xp.tile(x, (2, 1, 2)), (3,))
row("tile", lambda xp, x: xp.tile(x, (0, 2)), (3,))
row("repeat", lambda xp, x: xp.repeat(x, 3), (2, 2))
row("repeat", lambda xp, x: xp.repeat(x, 2, axis=-1), (2, 3))
row("repeat", lambda xp, x: xp.repeat(x, 2, axis=0), (2, 3))
row("tril", lambda xp, x: xp.tril(x) + 2.0 * xp.tril(x, k=-1), (2, 3, 4))
row("triu", lambda xp, x: xp.triu(x) + 2.0 * xp.triu(x, k=1), (3, 3))
row("concat", lambda xp, a, b: xp.concat([a, b, a]), (2, 3), (1, 3))
numpy_row("concat", lambda xp, a, b: xp.concat((a, np.ones((2, 2)), b), axis=-1), (2, 3), (2, 1))
row("concat", lambda xp, a, b: xp.concat([a, b], axis=None), (2, 3), (4,))
row("stack", lambda xp, a, b: xp.stack([a, b * 2.0, a]), (2, 3), (2, 3))
numpy_row("stack", lambda xp, a: xp.stack((a, np.ones((2, 3))), axis=-1), (2, 3))
row("unstack", lambda xp, x: xp.unstack(x), (3, 2))
row("unstack", lambda xp, x: xp.unstack(x, axis=-1)[1], (2, 3))
row("unstack", lambda xp, x: [part * part for part in x], (3, 2))
row("meshgrid", lambda xp, a, b: xp.meshgrid(a, b), (2,), (3,))
row("meshgrid", lambda xp, a, b, c: xp.meshgrid(a, b, c, indexing="ij"), (2,), (3,), (1,))
row("meshgrid", lambda xp, a, b, c: xp.meshgrid(a, b, c), (2,), (3,), (1,))
row("meshgrid", lambda xp, a: xp.meshgrid(a), (2,))
row("diff", lambda xp, x: xp.diff(x * x), (2, 4))
row("diff", lambda xp, x: xp.diff(x * x, n=2, axis=0), (4, 2))
row("diff", lambda xp, x, a, b: xp.diff(x, axis=1, prepend=a, append=b), (2, 3), (2, 1), (2, 2))
row("sort", lambda xp, x: xp.sort(x * x), (3, 5))
row("sort", lambda xp, x: xp.sort(x, axis=0, descending=True, stable=False), (4, 2))
for _name in ("unique_all", "unique_counts", "unique_inverse"):
    row(_name, lambda xp, x, f=_name: getattr(xp, f)(xp.concat([x, x * 1.0]))[0], (4,))
row("unique_values", lambda xp, x: xp.unique_values(xp.stack([x, x * 1.0])), (4,))
row("to_device", lambda xp, x: x.to_device("cpu") * 2.0, (3,))
row("from_dlpack", lambda xp, x: xp.from_dlpack(x) * 2.0, (3,))
row("asarray", lambda xp, x: xp.asarray(x) * xp.asarray(x, copy=True) * xp.asarray(x, dtype=xp.float64), (3,))
row(
    "full_like",
    lambda xp, x: xp.full_like(x, 2.0, dtype=None) * x + xp.full_like(x, fill_value=3, dtype=xp.float64),
    (2, 3),
)

# dtypes: a cast there and back passes gradients at the precision of the narrower side
row("astype", lambda xp, x: xp.astype(x, xp.float64, copy=True) * 2.0, (3,))
row("astype", lambda xp, x: xp.astype(x, xp.float64, copy=False) * 2.0, (3,))

# --- reading and writing by position ---------------------------------------------------------------------------------

IDS = np.asarray([2, 0, 2, -1, 1, 2])
MASK = np.asarray([[True, False, True], [False, False, True]])
KEYS = {
    "integer": 1,
    "negative": -1,
    "slice": slice(0, 2),
    "step": slice(None, None, 2),
    "backwards": slice(None, None, -1),
    "backwards-step": slice(3, 0, -2),
    "several": (slice(1, None), 0),
    "ellipsis": (..., 0),
    "ellipsis-middle": (1, ..., slice(1, 3)),
    "none": (None, 1),
    "none-end": (..., None),
    "none-middle": (slice(None), None, 0),
    "empty": slice(2, 2),
    "all": ...,
    "integers": IDS,
    "integers-2d": IDS.reshape(2, 3),
    "pairs": (IDS, np.asarray([0, 1, 0, 1, -1, 0])),
    "broadcast-pairs": (np.asarray([[0], [2], [0]]), np.asarray([1, 1])),
    "integer-and-integers": (1, np.asarray([0, 0, 1])),
    "scalar-array": np.asarray(1),
    "scalar-array-and-integers": (np.asarray(-1), np.asarray([0, 0, 1])),
    "integer-rest": (-1, ...),
    "slices": (slice(0, 2), slice(None), slice(2, 0, -1)),
    "ellipsis-backwards": (..., slice(None, None, -2)),
    "none-ellipsis": (None, 1, ..., None),
    "all-integers": (IDS, np.asarray([0, 1, 0, 1, -1, 0]), np.asarray([2, 2, 2, 0, 1, 2])),
    "all-positions": (IDS, -1, np.asarray([2, 2, 2, 0, 1, 2])),
    "no-integers": np.asarray([], dtype=np.int64),
}
for _label, _key in KEYS.items():
    row("getitem", lambda xp, x, k=_key: x[arrays(xp, k)] * x[arrays(xp, k)], (4, 2, 3))
row("getitem", lambda xp, x: x[xp.asarray(MASK)] ** 2, (2, 3))
row("getitem", lambda xp, x: x[x > 0.0] ** 2, (2, 3))
row("getitem", lambda xp, x: x[xp.asarray(MASK[0])], (3, 2))
row("getitem", lambda xp, x: x[()] * x, (2,))
numpy_row("getitem", lambda xp, x: x[np.int64(-1)] * x[IDS] + x[x > 0.0][0], (3, 2))
row("getitem", lambda xp, x: x[xp.argmax(x[:, 0]), :] * x[:, None, 0], (5, 1))
row("getitem", lambda xp, x: x[xp.argmax(x)] + x[xp.argsort(x)], (5,))
row("take", lambda xp, x: xp.take(x, xp.asarray(IDS), axis=0) ** 2, (4, 2))
row("take", lambda xp, x: xp.take(x, xp.asarray(IDS), axis=-2) ** 2, (2, 4, 2))
row("take", lambda xp, x: xp.take(x, xp.asarray(IDS)) ** 2, (4,))
row("take", lambda xp, x: xp.take(x, xp.argsort(x)) ** 2, (4,))
ORDER = np.asarray([[1, 0, 0, -1], [2, 2, 1, 0]])
row("take_along_axis", lambda xp, x: xp.take_along_axis(x, xp.asarray(ORDER), axis=1) ** 2, (2, 3))
row("take_along_axis", lambda xp, x: xp.take_along_axis(x, xp.asarray(ORDER), axis=-1) ** 2, (2, 3))
row("take_along_axis", lambda xp, x: xp.take_along_axis(x, xp.asarray(ORDER.T), axis=0) ** 2, (3, 2))
row("take_along_axis", lambda xp, x: xp.take_along_axis(x, xp.asarray(ORDER)) ** 2, (1, 3))
row("take_along_axis", lambda xp, x: xp.take_along_axis(x, xp.asarray(ORDER[:1]), axis=1) ** 2, (2, 3))
row("take_along_axis", lambda xp, x: xp.take_along_axis(x, xp.argsort(x, axis=0), axis=0), (3, 2))


def written(key: Any) -> Callable[..., Any]:
    def function(xp: Any, x: Any, value: Any) -> Any:
        copy = xp.asarray(x, copy=True)
        copy[arrays(xp, key)] = value
        copy[0, ...] = copy[0, ...] * 2.0
        return copy * x

    return function


row("setitem", written(1), (3, 2), (2,))
row("setitem", written(slice(None, None, -2)), (3, 2), (2, 2))
row("setitem", written((..., 0)), (3, 2), ())
row("setitem", written((-1, ...)), (3, 2), (2,))
row("setitem", written((slice(0, 2), 0)), (3, 2), (2,))
row("setitem", written(np.asarray([[True, False], [False, True], [True, True]])), (3, 2), (4,))
row("setitem", lambda xp, x, value: written(0)(xp, xp.zeros_like(x), value) + x, (3, 2), (2,))
row("setitem", lambda xp, x: written(0)(xp, x, 1.5), (3, 2))

# --- what the standard lacks -----------------------------------------------------------------------------------------

row("erf", lambda xp, x: extra.erf(x), (3, 4))
row("scatter_add", lambda xp, x, u: extra.scatter_add(x * x, xp.asarray([2, 0, 2, 1]), u * u), (3, 2), (4, 2))
numpy_row("scatter_add", lambda xp, u: extra.scatter_add(np.ones(3), np.asarray([2, 0, 2, 1]), u * u), (4,))
numpy_row("scatter_add", lambda xp, x: extra.scatter_add(x * x, np.asarray([2, 2]), np.ones((2, 2))), (3, 2))

# --- operations ------------------------------------------------------------------------------------------------------

KEPT = np.asarray([[True, True, False], [False, False, False], [True, True, True]])
row("softmax", lambda xp, x: ops.softmax(x), (2, 3))
row("softmax", lambda xp, x: ops.softmax(x, xp.asarray(KEPT)), (3, 3))
row("softmax", lambda xp, x: ops.softmax(x * x, xp.asarray(KEPT)), (2, 3, 3))
row("softmax", lambda xp, x: ops.softmax(x + 1000.0), (4,))
row("softmax", lambda xp, x: ops.softmax(x, temperature=0.5), (2, 3))
row("softmax", lambda xp, x: ops.softmax(x, xp.asarray(KEPT), temperature=2.5), (3, 3))
row("layer_norm", lambda xp, x, w, b: ops.layer_norm(x, w, b), (2, 3, 4), (4,), (4,))
row("layer_norm", lambda xp, x, w: ops.layer_norm(x, w, None, epsilon=1e-3), (3, 4), (4,))
numpy_row("layer_norm", lambda xp, w: ops.layer_norm(np.arange(6.0).reshape(2, 3), w, None), (3,))
numpy_row("layer_norm", lambda xp, x: ops.layer_norm(x, np.ones(3), np.ones(3)), (2, 3))
row("rms_norm", lambda xp, x, w: ops.rms_norm(x, w, epsilon=1e-3), (2, 3, 4), (4,))
row("silu", lambda xp, x: ops.silu(x), (3, 4))
row("squared_norm", lambda xp, x, y: ops.squared_norm(x * x, y), (3, 4), (2,))
row("cast", lambda xp, x, y: xp.sum(ops.cast(x * x, y, dtype="float64")[0] ** 2) * y, (3, 4), (2,))
row("linear", lambda xp, x, w, b: ops.linear(x, w, b), (2, 3, 4), (4, 5), (5,))
row("linear", lambda xp, x, w: ops.linear(x, w), (3, 4), (4, 5))
row("linear", lambda xp, x, w: ops.linear(x, w), (4,), (4, 5))
numpy_row("linear", lambda xp, w: ops.linear(np.ones((2, 4)), w), (4, 5))


def _weighted_heads(x: Any, *projections: Any) -> Any:
    first, second = ops.project_heads(x, *projections)
    return first * second[:, :1, :, :1] + first


_SHAPES = ((2, 3, 4), (4, 6), (4, 2), (6,), (2,))
row("project_heads", lambda xp, x, v, w, b, c: _weighted_heads(x, (v, b, 2), (w, c, 1)), *_SHAPES)
row("project_heads", lambda xp, x, v, w: ops.project_heads(x, (v, None, 2), (w, None, 1))[0], *_SHAPES[:3])
row("relu", lambda xp, x: ops.relu(x) * x, (3, 4))
row("gelu", lambda xp, x: ops.gelu(x), (3, 4))
row("gelu_tanh", lambda xp, x: ops.gelu_tanh(x), (3, 4))
row("relu_squared", lambda xp, x: ops.relu_squared(x), (3, 4))
row("quick_gelu", lambda xp, x: ops.quick_gelu(x), (3, 4))
for _name in ("relu", "gelu", "gelu_tanh", "silu", "relu_squared", "quick_gelu"):
    row("activation", lambda xp, x, f=_name: ops.activation(f)(x), (3, 4))
row("activation", lambda xp, x, y: gated(x, y, "silu") * x, (3, 4), (3, 4))
row("activation", lambda xp, x: gated(x, xp.asarray(KEPT * 1.5), "gelu"), (3, 3))
row("dropout", lambda xp, x: ops.dropout(x * x, xp.asarray(KEPT), 0.8), (3, 3))
ANGLES = np.arange(8.0).reshape(4, 2)
row("rotate", lambda xp, x: ops.rotate(x, xp.asarray(np.cos(ANGLES)), xp.asarray(np.sin(ANGLES))) ** 2, (1, 2, 4, 5))
TOKENS = np.asarray([[3, 1, 3], [0, 3, 1]])
row("embedding", lambda xp, w: ops.embedding(w, xp.asarray(TOKENS)) ** 2, (5, 2))
row("embedding", lambda xp, w: ops.embedding(w, xp.asarray(TOKENS[0]), scale=1.7) ** 2, (5, 2))


def _experts(*weights: Any) -> list[Any]:
    return [with_fields(Linear(4, 5, bias=False, init=0), weight=weight) for weight in weights]


NUMBERS = np.asarray([0, 0, 2])  # no row of the second expert
row(
    "apply_experts",
    lambda xp, x, v, w: ops.apply_experts(x, xp.asarray(NUMBERS), _experts(v, w, v * w)),
    (3, 4),
    (4, 5),
    (4, 5),
)
numpy_row("apply_experts", lambda xp, w: ops.apply_experts(np.ones((3, 4)), NUMBERS, _experts(w, w, w)), (4, 5))


def attended(**static: Any) -> Callable[..., Any]:
    def function(xp: Any, query: Any, key: Any, value: Any) -> Any:
        return ops.attention(query, key, value, **{name: arrays(xp, item) for name, item in static.items()})

    return function


HEADS = ((2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 3))  # lengths of queries and keys differ
SELF = ((2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 3, 4))
PADDING = np.asarray([[True, True, True, False, False], [False] * 5]).reshape(2, 1, 1, 5)  # one sentence of nothing
ROWS_OUT = np.asarray([[True, False, True], [False, False, False], [True, True, True]]).reshape(1, 1, 3, 3)
KEEP = np.random.default_rng(0).uniform(size=(2, 2, 3, 5)) < 0.7
row("attention", attended(), *HEADS)
row("attention", attended(mask=PADDING), *HEADS)
row("attention", attended(causal=True), *HEADS)
row("attention", attended(causal=True), *SELF)
row("attention", attended(causal=True), (1, 1, 4, 2), (1, 1, 3, 2), (1, 1, 3, 2))  # the first query sees nothing
row("attention", attended(mask=ROWS_OUT, causal=True, scale=0.3), *SELF)
row("attention", attended(dropout_mask=KEEP, keep_probability=0.7), *HEADS)
row("attention", attended(mask=PADDING, causal=True, dropout_mask=KEEP, keep_probability=0.7), *HEADS)
row("attention", lambda xp, x: ops.attention(x, x, x, causal=True), (1, 2, 3, 4))
row("attention", lambda xp, q, k, v, b: ops.attention(q, k, v, bias=b), *HEADS, (2, 3, 5))
row("attention", lambda xp, q, k, v, b: ops.attention(q, k, v, xp.asarray(PADDING), b, causal=True), *HEADS, (5,))
row("attention", attended(causal=True), (2, 4, 3, 2), (2, 2, 3, 2), (2, 2, 3, 2))  # two heads share keys and values
row("attention", attended(), (2, 4, 3, 2), (2, 1, 3, 2), (2, 1, 3, 2))
numpy_row("attention", lambda xp, query: attended()(xp, query, np.ones((2, 3, 4)), np.ones((2, 3, 2))), (2, 3, 4))
numpy_row("attention", lambda xp, value: attended()(xp, np.ones((2, 3, 4)), np.ones((2, 2, 4)), value), (2, 2, 4))
row("attention_weights", lambda xp, query, key: ops.attention_weights(query, key, xp.asarray(PADDING)), *HEADS[:2])
row("attention_weights", lambda xp, query, key: ops.attention_weights(query, key, causal=True), *HEADS[:2])

LABELS = np.asarray([[2, 0, 1], [0, 3, 3]])  # 0 is padding
row("cross_entropy", lambda xp, x: ops.cross_entropy(x, xp.asarray(LABELS)), (2, 3, 4))
row(
    "cross_entropy",
    lambda xp, x: ops.cross_entropy(x * x, xp.asarray(LABELS), pad_id=0, label_smoothing=0.1),
    (2, 3, 4),
)
row("cross_entropy", lambda xp, x: ops.cross_entropy(x, xp.asarray(LABELS), pad_id=-1, label_smoothing=0.3), (2, 3, 4))
row("cross_entropy", lambda xp, x: ops.cross_entropy(x, xp.asarray(LABELS) * 0, pad_id=0), (2, 3, 4))
row("cross_entropy", lambda xp, x: ops.cross_entropy(x + 1000.0, xp.asarray(LABELS)), (2, 3, 4))
