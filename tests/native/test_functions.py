"""Functions of the native library against those of NumPy: random shapes, strides, broadcasts and dtypes."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import for_each, native_levels
from xformer import native
from xformer.backends import resolve
from xformer.errors import ShapeError
from xformer.native.functions import LOWERINGS, _mask_of
from xformer.tracing.record import base_function

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="the library was not compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy warns about NaN, infinities and division by zero
]

SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 1e-40, -1e30, 88.0]
FLOATS, NUMBERS = ("float32", "float64"), ("float32", "float64", "int64")  # what functions compute

xp = resolve("numpy")


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Return random values, of which some are special or equal."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in FLOATS:
        special = rng.choice(SPECIAL, shape)
        return np.where(rng.random(shape) < 0.2, special, rng.normal(size=shape) * 3).astype(dtype)
    limits = np.iinfo(dtype)
    extreme = rng.choice([limits.min, limits.max, 0, -1, 1], shape)
    return np.where(rng.random(shape) < 0.1, extreme, rng.integers(0, 7, shape) - 3).astype(dtype)


def strided(rng: np.random.Generator, x: Any) -> Any:
    """Return an array with the same elements and any strides, sometimes read-only."""
    order = rng.permutation(x.ndim)
    steps = rng.choice([1, 1, 1, 2, -1, -2], x.ndim)
    shape = [size * abs(step) + 1 for size, step in zip(x.shape, steps, strict=True)]
    memory = np.zeros([shape[i] for i in order], x.dtype).transpose(np.argsort(order))
    if rng.random() < 0.3:  # contiguous in the permuted order
        memory = np.zeros([x.shape[i] for i in order], x.dtype).transpose(np.argsort(order))
        steps = np.ones(x.ndim, int)
    view = memory[(*(slice(None, None, step) for step in steps), ...)]
    view = view[(*(slice(size) for size in x.shape), ...)]
    view[...] = x
    if rng.random() < 0.2:
        view.flags.writeable = False
    return view


SHAPES = st.one_of(
    st.lists(st.integers(0, 5), max_size=6).map(tuple),
    st.sampled_from([(70,), (3, 1000), (1000, 3), (130, 67), (67, 16, 20), (20000,), (9000, 2), (2, 3, 5000)]),
)
RNGS = st.integers(0, 2**32 - 1).map(np.random.default_rng)


def array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    return strided(rng, values(rng, shape, dtype))


def broadcast_part(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts to `shape`."""
    part = tuple(1 if rng.random() < 0.25 else size for size in shape)
    return part[rng.integers(0, len(shape) + 1) if rng.random() < 0.2 else 0 :]


def same(actual: Any, expected: Any, ulp: float = 0) -> None:
    """Check that arrays are equal with NaN and signs of zero, up to some units in the last place."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if expected.dtype.kind != "f":
        np.testing.assert_array_equal(actual, expected)
        return
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite])
    wide, unit = expected[finite].astype(np.float64), np.spacing(np.abs(expected[finite])).astype(np.float64)
    assert np.all(np.abs(actual[finite].astype(np.float64) - wide) <= ulp * unit)
    assert np.all((np.signbit(actual) == np.signbit(expected))[finite & (expected == 0)])


def lowered(rng: np.random.Generator, name: str, *args: Any, ulp: float = 0, **keywords: Any) -> None:
    """Compare a function with its lowering, which must exist, with an output of any strides."""
    expected = np.asarray(base_function(xp, name)(*args, **keywords))
    out = strided(rng, np.zeros(expected.shape, expected.dtype))
    out.flags.writeable = True
    assert LOWERINGS[name](out, args, keywords)
    same(out, expected, ulp)


# --- elementwise functions --------------------------------------------------------------------------------------------

# Names of functions, the dtypes that they compute, and how many arrays they take.
ELEMENTWISE: list[tuple[str, tuple[str, ...], int]] = [
    ("add subtract multiply operator_add operator_sub operator_mul", NUMBERS, 2),
    ("divide operator_truediv", FLOATS, 2),
    ("floor_divide maximum minimum remainder", ("int64",), 2),
    ("equal not_equal less less_equal greater greater_equal operator_lt operator_ne", (*NUMBERS, "bool"), 2),
    ("logical_and logical_or logical_xor operator_and bitwise_or", ("bool",), 2),
    ("logical_not", ("bool",), 1),
    ("negative abs square sign operator_neg operator_abs", NUMBERS, 1),
    ("sqrt reciprocal isfinite isinf isnan", FLOATS, 1),
]
CALLS = [(name, dtype, count) for names, dtypes, count in ELEMENTWISE for name in names.split() for dtype in dtypes]


@settings(max_examples=600)
@given(RNGS, SHAPES, st.sampled_from(CALLS))
def test_elementwise(rng: Any, shape: Any, call: tuple[str, str, int]) -> None:
    name, dtype, count = call
    arrays = [array(rng, broadcast_part(rng, shape), dtype) for _ in range(count - 1)] + [array(rng, shape, dtype)]
    lowered(rng, name, *(arrays if rng.random() < 0.5 else arrays[::-1]))


@given(RNGS, SHAPES, st.sampled_from([*NUMBERS, "int32", "bool", "int8", "uint8"]))
def test_where(rng: Any, shape: Any, dtype: str) -> None:
    parts = (
        array(rng, broadcast_part(rng, shape), kind) for kind in ("bool", *[dtype if dtype != "int8" else "bool"] * 2)
    )
    lowered(rng, "where", *parts)


@given(RNGS, SHAPES, st.sampled_from([(-1, 2), (None, 1), (0, None), (None, None), (2, 1)]))
def test_clip(rng: Any, shape: Any, bounds: Any) -> None:
    lowered(rng, "clip", array(rng, shape, "int64"), *bounds)


@given(RNGS, SHAPES, st.sampled_from(["add", "multiply", "less", "divide", "where"]))
def test_promotion(rng: Any, shape: Any, name: str) -> None:
    """Operands are cast to one dtype: arrays of different dtypes, and numbers of Python."""
    dtypes = rng.choice([*NUMBERS, "bool"], 2)
    others = [array(rng, broadcast_part(rng, shape), dtypes[1]), 2, 1.5, np.float32(0.1), True]
    x, other = array(rng, shape, dtypes[0]), others[rng.integers(len(others))]
    args = (array(rng, shape, "bool"), x, other) if name == "where" else (x, other)
    expected = np.asarray(getattr(xp, name)(*args))
    if name in ("add", "multiply") and expected.dtype == bool:
        return  # not supported
    lowered(rng, name, *args)


# --- creation and copies ----------------------------------------------------------------------------------------------


@given(RNGS, SHAPES, st.sampled_from(["float32", "float64", "int32", "int64", "bool", "int8", "uint8"]))
def test_astype(rng: Any, shape: Any, to: str) -> None:
    dtype = str(rng.choice([*NUMBERS, "int32", "bool"]))
    x = values(rng, shape, dtype)
    if dtype in FLOATS and to != "bool" and to not in FLOATS:  # the result of values that do not fit is not defined
        x = rng.integers(0, 100, shape).astype(dtype) + np.asarray(0.75, dtype)
    lowered(rng, "astype", strided(rng, np.asarray(x)), np.dtype(to))


@given(RNGS, SHAPES, st.sampled_from([*NUMBERS, "int32", "bool"]))
def test_creation(rng: Any, shape: Any, dtype: str) -> None:
    lowered(rng, "zeros", shape, dtype=np.dtype(dtype))
    lowered(rng, "ones_like", array(rng, shape, dtype))
    lowered(rng, "full", shape, 3.0 if dtype in FLOATS else 1, dtype=np.dtype(dtype))
    assert LOWERINGS["empty_like"](np.empty(shape, dtype), (array(rng, shape, dtype),), {})


@given(RNGS, SHAPES)
def test_reshape(rng: Any, shape: Any) -> None:
    x = array(rng, shape, "float32")
    out = np.empty(x.size, np.float32)
    assert LOWERINGS["reshape"](out, (x, (-1,)), {})
    same(out, x.reshape(-1))


def test_a_view_needs_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "call", None)
    x = np.zeros((2, 3), np.float32)
    for key in ((0, slice(1, None)), (..., None)):
        assert LOWERINGS["getitem"](x[key], (x, key), {})


# --- reductions -------------------------------------------------------------------------------------------------------


def axes_of(rng: np.random.Generator, ndim: int) -> Any:
    if rng.random() < 0.2:
        return None
    count = rng.integers(0, ndim + 1)
    axes = tuple(int(axis) - ndim * int(rng.integers(2)) for axis in rng.permutation(ndim)[:count])
    return axes[0] if len(axes) == 1 else axes


EXACT = [(name, dtype) for name in ("sum", "any", "all") for dtype in ("int64", "bool", *FLOATS)]


@given(RNGS, SHAPES, st.sampled_from([call for call in EXACT if call[0] != "sum" or call[1] not in FLOATS]))
def test_exact_reductions(rng: Any, shape: Any, call: tuple[str, str]) -> None:
    name, dtype = call
    lowered(rng, name, array(rng, shape, dtype), axis=axes_of(rng, len(shape)), keepdims=bool(rng.integers(2)))


def sum_of(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Return a sum by the native library, which kernels use, as programs return the bits of NumPy."""
    out = np.empty(np.sum(x, axis=axis, keepdims=keepdims).shape, x.dtype)
    native.call("sum", (x, out), _mask_of(axis, x.ndim))
    return out


@given(RNGS, SHAPES, st.sampled_from(FLOATS))
def test_sums_of_floats(rng: Any, shape: Any, dtype: str) -> None:
    x = strided(rng, (rng.normal(size=shape) + 1.0).astype(dtype))
    axis, keepdims = axes_of(rng, len(shape)), bool(rng.integers(2))
    exact = np.sum(x.astype(np.float64), axis=axis, keepdims=keepdims)
    magnitudes = np.sum(np.abs(x.astype(np.float64)), axis=axis, keepdims=keepdims)  # of terms that may cancel
    tolerance = 2e-6 if dtype == "float32" else 1e-13
    assert np.all(np.abs(sum_of(x, axis, keepdims) - exact) <= tolerance * np.maximum(magnitudes, 1e-3))


@given(RNGS)
def test_sums_of_special_values(rng: Any) -> None:
    x = array(rng, (40, 70), "float32")
    x = np.where(np.isfinite(x), np.float32(1), x)
    for axis in (0, 1, None):
        same(sum_of(x, axis), np.asarray(np.sum(x, axis=axis)), 1)


def test_sums_are_as_accurate_as_pairwise_ones() -> None:
    x = np.random.default_rng(0).uniform(0, 1, (4096, 300)).astype(np.float32)
    for axis in (0, 1, (0, 1)):
        for order in (x, x.T.copy().T):
            expected = np.sum(order.astype(np.float64), axis=axis)
            assert np.max(np.abs(sum_of(order, axis) - expected) / expected) < 3e-7


@given(RNGS, SHAPES, st.sampled_from(["int64", "bool"]), st.booleans())
def test_cumulative_sum(rng: Any, shape: Any, dtype: str, include_initial: bool) -> None:
    for axis in range(len(shape)):
        lowered(rng, "cumulative_sum", array(rng, shape, dtype), axis=axis, include_initial=include_initial)


# --- indexing ---------------------------------------------------------------------------------------------------------


def indices_for(rng: np.random.Generator, size: int, shape: Any) -> Any:
    return strided(rng, rng.integers(-size, max(size, 1), shape).astype(rng.choice(["int32", "int64"])))


SMALL = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple) | st.sampled_from([(300, 70), (4, 5, 900)])


@given(RNGS, SMALL, st.sampled_from(["float32", "int64", "bool"]), st.lists(st.integers(0, 4), max_size=2).map(tuple))
def test_take(rng: Any, shape: Any, dtype: str, positions: Any) -> None:
    axis = int(rng.integers(-len(shape), len(shape)))
    x, indices = array(rng, shape, dtype), indices_for(rng, shape[axis], positions)
    lowered(rng, "take", x, indices, axis=axis)
    lowered(rng, "getitem", x, (*[slice(None)] * (axis % len(shape)), indices))
    lowered(rng, "getitem", x, (..., indices, *[slice(None)] * (len(shape) - axis % len(shape) - 1)))


@given(RNGS, SMALL, st.sampled_from(["float32", "int64", "bool"]), st.lists(st.integers(0, 2), max_size=2).map(tuple))
def test_set_item_at_indices(rng: Any, shape: Any, dtype: str, positions: Any) -> None:
    axis = int(rng.integers(0, len(shape)))
    x, size = array(rng, shape, dtype), shape[axis]
    if np.prod(positions) > size:
        return
    indices = rng.permutation(size)[: int(np.prod(positions))].reshape(positions) - size * rng.integers(2)
    value = array(rng, broadcast_part(rng, (*shape[:axis], *positions, *shape[axis + 1 :])), dtype)
    lowered(rng, "setitem", x, value, (*[slice(None)] * axis, strided(rng, indices)))


@for_each("size", [1, 5000])
def test_the_last_value_at_an_index_remains(size: int) -> None:
    rng = np.random.default_rng(0)
    x, values = np.zeros((5, size), np.float32), rng.normal(size=(300, size)).astype(np.float32)
    lowered(rng, "setitem", x, values, rng.integers(-5, 5, 300))


@given(RNGS, SMALL, st.sampled_from(["float32", "int64"]))
def test_set_item_at_slices(rng: Any, shape: Any, dtype: str) -> None:
    x = array(rng, shape, dtype)
    key = tuple(
        [slice(None), slice(1, None), slice(None, None, -1), int(rng.integers(-size, size)), ...][rng.integers(4)]
        for size in shape
    )
    lowered(rng, "setitem", x, 3, key)
    lowered(rng, "setitem", x, array(rng, broadcast_part(rng, x[key].shape), "int32"), key)
    same_array = x.copy()
    assert LOWERINGS["setitem"](same_array, (same_array, 1, key), {})
    x = x.copy()
    x[key] = 1
    same(same_array, x)


@for_each("bad", [3, -4, 2**40, -(2**62)])
@for_each("size", [1, 5000])
def test_indices_out_of_range(bad: int, size: int) -> None:
    memory = np.zeros((5, size), np.float32)
    x, values = memory[1:4], np.ones((4, size), np.float32)
    indices = np.array([0, 2, bad, 1])
    out = np.empty((4, size), np.float32)
    calls = [("take", (x, indices, out)), ("put", (values, indices, x))]
    for name, arrays in calls:
        with pytest.raises(IndexError, match="an index is out of range"):
            native.call(name, arrays, 0)
        assert not memory[[0, 4]].any()
        native.call("take", (x, np.array([0, -3]), out[:2]), 0)  # the error is over


def test_empty_axes_have_no_positions() -> None:
    with pytest.raises(IndexError, match="out of range"):
        native.call("take", (np.zeros((0, 3), np.float32), np.zeros(2, np.int64), np.zeros((2, 3), np.float32)), 0)


# --- checks -----------------------------------------------------------------------------------------------------------


def wrong_calls() -> list[Any]:
    x, y, i = np.zeros((3, 4), np.float32), np.zeros((3, 4), np.float32), np.zeros(2, np.int64)
    wide, b = np.zeros((3, 4)), np.zeros((3, 4), bool)
    half = np.zeros((3, 4), np.float16)
    return [
        ("add", (x, wide, y)),
        ("add", (x, y, wide)),
        ("add", (x, y[:, :3], y)),
        ("add", (x, y, y[0])),
        ("add", (x, None, y)),
        ("add", (x, y)),
        ("add", (b, b, b)),
        ("add", (half, half, half)),
        ("less", (x, y, y)),
        ("logical_and", (x, y, b)),
        ("sqrt", (x.astype(np.int64), x.astype(np.int64))),
        ("where", (x, x, y, y)),
        ("where", (b, x, wide, y)),
        ("copy", (half, x)),
        ("copy", (x, y[0])),
        ("fill", (half,)),
        ("fill", ()),
        ("sum", (x, y), 0b1),
        ("sum", (x, y[0]), 0b10),
        ("sum", (x, y[0]), 0b101),
        ("sum", (x, y[0]), -1),
        ("sum", (x, wide[0]), 0b1),
        ("take", (x, i, y), 0),
        ("take", (x, i, y[:2]), 2),
        ("take", (x, i, y[:2]), -1),
        ("take", (x, i.astype(np.float32), y[:2]), 0),
        ("take", (x, i, y[:2, :1]), 0),
        ("take", (x, i, wide[:2]), 0),
        ("put", (y, i, x), 0),
        ("put", (wide[:2], i, x), 0),
    ]


@for_each("number", range(len(wrong_calls())))
def test_wrong_arrays_are_refused(number: int) -> None:
    name, arrays, *integers = wrong_calls()[number]
    with pytest.raises(ShapeError, match=f"^{name}: "):
        native.call(name, arrays, *integers)


def test_what_is_not_supported() -> None:
    x, half = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float16)
    big, subclass = x.astype(">f4"), np.zeros(3, np.float32).view(np.recarray)
    for name, out, args, keywords in [
        ("add", half, (half, half), {}),
        ("add", x, (big, x), {}),
        ("add", x[0], (subclass, x[0]), {}),
        ("add", np.float32(1), (np.float32(0), np.float32(1)), {}),
        ("add", x, (x, x), {"where": x > 0}),
        ("add", x > 0, (x > 0, x > 0), {}),
        ("abs", x.astype(np.int32), (x.astype(np.int32),), {}),
        ("sum", x[0], (x,), {"axis": 0}),
        ("less", x > 0, (x.astype(np.int64), 2**70), {}),
        ("sum", np.zeros(3, np.int64), (x > 0,), {"axis": 0, "initial": 3}),
        ("getitem", x[x > 0], (x, x > 0), {}),
        ("take", x, (x, [0, 1]), {"axis": 0}),
    ]:
        assert not LOWERINGS[name](out, args, keywords), name


def test_every_function_is_one_of_the_namespace() -> None:
    for name in LOWERINGS:
        assert callable(base_function(xp, name)), name
    assert operator.add is base_function(xp, "operator_add")


# --- threads and instruction sets -------------------------------------------------------------------------------------

_DIGEST = """
import hashlib, sys
import numpy as np
from xformer import native
from xformer.threads import set_num_threads
assert native.level() == sys.argv[1], native.WHY_NOT
set_num_threads(int(sys.argv[2]))
rng = np.random.default_rng(0)
x, y = (rng.normal(size=(517, 1033)).astype(np.float32) for _ in range(2))
digest = hashlib.sha256()
def call(name, arrays, *integers):
    native.call(name, arrays, *integers)
    digest.update(arrays[-1].tobytes())
for name in ("add", "divide"):
    call(name, (np.abs(x), y, np.empty_like(x)))
for operands in ((np.abs(x), np.empty_like(x)), (np.abs(x).T[3:], np.empty_like(x.T[3:]))):
    call("sqrt", operands)
for mask, shape in ((1, 1033), (2, 517), (3, ())):
    call("sum", (np.abs(x) + 0.5, np.empty(shape, np.float32)), mask)
print(digest.hexdigest())
"""


def test_bits_do_not_depend_on_threads_and_vectors() -> None:
    """Sums have one order; AVX2 and AVX-512 have the same bits, and the baseline has for functions without products."""
    levels = [level for level in native_levels() if level != "baseline"] or ["baseline"]
    digests = set()
    for level in levels:
        for threads in ("1", "3"):
            environment = os.environ | {"XFORMER_NATIVE": level, "PYTHONPATH": str(Path(__file__).parents[2])}
            command = [sys.executable, "-c", _DIGEST, level, threads]
            digests.add(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert len(digests) == 1
