"""Random programs: a jitted function returns the bits of the function on NumPy for any values, or raises its error.

`nox -s native -- tests/stress/test_native_programs.py` runs them with sanitizers, and with each set of instructions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import xformer as xf
from tests.native.test_functions import array, same
from xformer import native, ops
from xformer.backends import array_namespace, is_floating
from xformer.errors import DifferentiationError, XformerError

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="the library was not compiled"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
MAX_SIZE = 20_000
DTYPES = ["float32", "float32", "float32", "float64", "int64", "int32", "bool"]
SHAPES = [
    (),
    (1,),
    (3,),
    (0,),
    (2, 3),
    (3, 1),
    (1, 3),
    (2, 0),
    (0, 3),
    (2, 3, 4),
    (4, 1, 1, 3),
    (40, 70),
    (1, 2, 1, 3, 1, 2),
]
ERRORS = (ValueError, IndexError, TypeError, ArithmeticError, XformerError)
OUTCOMES: Counter[str] = Counter()


def written(xp: Any, x: Any, key: Any, value: Any) -> Any:
    copy = xp.asarray(x, copy=True)
    copy[key] = value
    return copy


def index(x: Any) -> Any:
    if x.dtype.kind != "i":  # NumPy takes more for scalars than for arrays without axes
        raise TypeError
    return x


def matrix(xp: Any, x: Any) -> Any:
    return xp.reshape(x, (1, 1, *x.shape[-2:]))


UNARY = (
    "abs", "negative", "square", "sign", "sqrt", "reciprocal", "exp", "expm1", "log", "log1p", "tanh", "sin", "cos",
)  # fmt: skip
UNARY += ("floor", "ceil", "trunc", "round", "isfinite", "isinf", "isnan", "logical_not", "bitwise_invert", "positive")
UNARY += ("matrix_transpose", "zeros_like", "ones_like", "empty_like", "flip", "sort", "argsort", "tril", "triu")
BINARY = ("add", "subtract", "multiply", "divide", "pow", "floor_divide", "remainder", "matmul", "atan2", "hypot")
BINARY += ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or")
BINARY += ("logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor", "vecdot", "copysign")
REDUCTIONS = ("sum", "prod", "mean", "any", "all", "var", "std", "argmax", "argmin", "count_nonzero")
AXES = [None, 0, -1, (0, 1), ()]
KEYS = [0, -1, slice(None, None, -1), slice(1, None), slice(None, None, 2), ..., None, (..., 0), (slice(None), 1)]
# Functions of a namespace, two arrays and a small integer; "+ 0" as the sign of the larger of two zeros is not defined.
FUNCTIONS: list[Callable[..., Any]] = [
    *(lambda xp, x, y, k, name=name: getattr(xp, name)(x) for name in UNARY if name != "empty_like"),
    *(lambda xp, x, y, k, name=name: getattr(xp, name)(x, y) for name in BINARY * 2),
    *(lambda xp, x, y, k, name=name: getattr(xp, name)(x, axis=AXES[k], keepdims=y.ndim > 1) for name in REDUCTIONS),
    *(lambda xp, x, y, k, name=name: getattr(xp, name)(x, axis=AXES[k]) + 0 for name in ("max", "min")),
    *(lambda xp, x, y, k, name=name: getattr(xp, name)(x, y) + 0 for name in ("maximum", "minimum")),
    *(lambda xp, x, y, k, dtype=dtype: xp.astype(x, getattr(xp, dtype)) for dtype in (*DTYPES[2:], "float16", "uint8")),
    *(lambda xp, x, y, k, key=key: x[key] for key in KEYS),
    *(lambda xp, x, y, k, key=key: written(xp, x, key, y) for key in KEYS),
    lambda xp, x, y, k: written(xp, x, slice(1, None), x[:-1, ...]),
    lambda xp, x, y, k: written(xp, x, ..., k + 0.5),
    lambda xp, x, y, k: written(xp, xp.broadcast_to(x, (2, *x.shape)), (0, ...), y),
    lambda xp, x, y, k: x + k,
    lambda xp, x, y, k: k - x,
    lambda xp, x, y, k: x * 1.5,
    lambda xp, x, y, k: x**k,
    lambda xp, x, y, k: x // k,
    lambda xp, x, y, k: x % 2.5,
    lambda xp, x, y, k: x > k,
    lambda xp, x, y, k: x == y,
    lambda xp, x, y, k: ~x,
    lambda xp, x, y, k: xp.where(x > k, x, y),
    lambda xp, x, y, k: xp.where(y != y, 0, x),
    lambda xp, x, y, k: xp.clip(x, -1, k) + 0,
    lambda xp, x, y, k: xp.cumulative_sum(x, axis=k % 3 - 1, include_initial=k > 1),
    lambda xp, x, y, k: xp.take(x, index(y), axis=k % 3 - 1),
    lambda xp, x, y, k: xp.take_along_axis(x, index(y), axis=-1),
    lambda xp, x, y, k: x[y],
    lambda xp, x, y, k: x[..., xp.astype(y, xp.int64)],
    lambda xp, x, y, k: written(xp, x, y, k),
    lambda xp, x, y, k: xp.reshape(x, (-1,)),
    lambda xp, x, y, k: xp.permute_dims(x, tuple(range(x.ndim))[::-1]),
    lambda xp, x, y, k: xp.expand_dims(x, axis=k % 2),
    lambda xp, x, y, k: xp.squeeze(x, axis=0),
    lambda xp, x, y, k: xp.broadcast_to(x, (2, *x.shape)),
    lambda xp, x, y, k: xp.moveaxis(x, 0, -1),
    lambda xp, x, y, k: xp.roll(x, k, axis=-1),
    lambda xp, x, y, k: xp.repeat(x, abs(k), axis=0),
    lambda xp, x, y, k: xp.tile(x, (2, 1)),
    lambda xp, x, y, k: xp.concat([x, y, x], axis=k % 3 - 1 if k < 2 else None),
    lambda xp, x, y, k: xp.stack([x, x], axis=k % 3 - 1),
    lambda xp, x, y, k: xp.unstack(x, axis=k % 2),
    lambda xp, x, y, k: xp.broadcast_arrays(x, y),
    lambda xp, x, y, k: xp.full(x.shape, k, dtype=x.dtype) + x,
    lambda xp, x, y, k: ops.softmax(x),
    lambda xp, x, y, k: ops.softmax(x, y > k),
    lambda xp, x, y, k: ops.gelu(x) + ops.silu(x) - ops.relu(x) * ops.gelu_tanh(x),
    lambda xp, x, y, k: ops.layer_norm(x, x[0, :], x[-1, :]),
    lambda xp, x, y, k: ops.rms_norm(x, xp.ones(x.shape[-1:], dtype=x.dtype)),
    lambda xp, x, y, k: ops.linear(x, xp.matrix_transpose(x)),
    lambda xp, x, y, k: ops.linear(x, y),
    lambda xp, x, y, k: ops.embedding(x, y),
    lambda xp, x, y, k: ops.cross_entropy(x, xp.argmax(x, axis=-1) + k % 2),
    lambda xp, x, y, k: ops.dropout(x, x > 0, 0.5),
    lambda xp, x, y, k: ops.top_k(x, k),
    lambda xp, x, y, k: ops.logsumexp(x),
    lambda xp, x, y, k: ops.attention(*[matrix(xp, x)] * 3, causal=k > 0),
    lambda xp, x, y, k: ops.attention(*[matrix(xp, x)] * 3, matrix(xp, x) > 0),
]  # fmt: skip


class Program:
    """A random function; each call is first made on NumPy arrays, which decides whether it is valid."""

    def __init__(self, choice: Callable[[Any], Any]) -> None:
        self.rng = np.random.default_rng(choice(range(2**16)))
        self.kinds = [(choice(SHAPES), choice(DTYPES)) for _ in range(choice((1, 2, 3)))]
        self.inputs = self.draw()
        self.calls: list[tuple[Callable[..., Any], int, int, int]] = []
        self.is_kept = [choice((False, True)) for _ in range(8)]  # which results are returned
        arrays = list(self.inputs)
        for _ in range(choice(range(2, 16))):
            indices = [choice(range(len(arrays))) for _ in range(2)]
            self.calls.append((choice(FUNCTIONS), *indices, choice(range(-2, 4))))
            try:
                new = self.run(self.inputs)
            except ERRORS:
                self.calls.pop()
                continue
            if all(x.size <= MAX_SIZE and x.ndim <= 7 for x in new):
                arrays = new
            else:
                self.calls.pop()

    def draw(self) -> list[Any]:
        """Return inputs with new values, of any strides."""
        return [array(self.rng, shape, dtype) for shape, dtype in self.kinds]

    def run(self, inputs: Any) -> list[Any]:
        arrays, xp = list(inputs), array_namespace(*inputs)
        for function, i, j, k in self.calls:
            result = function(xp, arrays[i], arrays[j], k)
            arrays += result if isinstance(result, list | tuple) else [result]
        return arrays

    def __call__(self, *inputs: Any) -> Any:
        results = self.run(inputs)[len(inputs) :]
        return [x for i, x in enumerate(results) if self.is_kept[i % 8]] + results[-1:]

    def gradients(self, *inputs: Any) -> Any:
        """Return derivatives of the sum of all floating results."""

        def total(inputs: Any) -> Any:
            xp = array_namespace(*inputs)
            return sum(xp.sum(xp.astype(x, xp.float64)) for x in self(*inputs) if is_floating(x.dtype))

        floating = [x for x in inputs if is_floating(x.dtype)]
        return list(xf.grad(lambda *x: total(self.merged(inputs, x)))(*floating))

    @staticmethod
    def merged(inputs: Any, floating: Any) -> Any:
        rest = iter(floating)
        return [next(rest) if is_floating(x.dtype) else x for x in inputs]


def outcome(function: Callable[..., Any], inputs: Any) -> Any:
    with np.errstate(all="ignore"):
        try:
            return [np.asarray(x) for x in function(*inputs)]
        except ERRORS as error:
            return error


def check(choice: Callable[[Any], Any]) -> None:
    program = Program(choice)
    function = program.gradients if choice((False, False, True)) else program
    jitted = xf.jit(lambda *inputs: function(*inputs))
    for _ in range(4):  # the first call is traced
        inputs = program.draw()
        # Rounding of NumPy depends on strides, so the function gets what jit copies, too.
        actual, expected = outcome(jitted, inputs), outcome(function, [np.array(x) for x in inputs])
        if isinstance(actual, xf.errors.JitError) and not isinstance(expected, xf.errors.JitError):
            OUTCOMES["refused"] += 1
            return
        if isinstance(expected, Exception):
            # NumPy refuses infinity and NaN as integers, but casts an array; and a plain array is traced in jit only.
            is_cast = isinstance(expected, OverflowError) or "float NaN" in str(expected)
            assert isinstance(actual, Exception) or is_cast or isinstance(expected, DifferentiationError), expected
            OUTCOMES["error"] += 1
            continue
        if isinstance(actual, Exception):
            raise actual
        for x, y in zip(actual, expected, strict=True):
            same(x, y)
        OUTCOMES["equal"] += 1


def test_jitted_random_programs_return_the_bits_of_the_function():
    @settings(max_examples=3 * settings().max_examples)
    @given(st.data())
    def run(data):
        check(lambda options: data.draw(st.sampled_from(options)))

    run()
    assert OUTCOMES["equal"] > 0.5 * OUTCOMES.total()
