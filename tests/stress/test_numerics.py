"""Every operation on every library against the portable definition in float64, over shapes, dtypes and magnitudes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import library_or_skip
from tests.stress.conftest import LARGEST_ERRORS
from xformer import vjp
from xformer.backends import array_namespace, dtype_name, from_host, is_floating, resolve, to_host
from xformer.environment import clear_cache
from xformer.ops import (
    attention,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    gelu_tanh,
    layer_norm,
    linear,
    project_heads,
    relu,
    rms_norm,
    rotate,
    silu,
    softmax,
)  # fmt: skip

# Largest difference relative to the largest expected value: a few roundings of sums of at most 300 terms.
TOLERANCES = {"float16": 8e-3, "bfloat16": 6e-2, "float32": 5e-5, "float64": 1e-12}
BACKENDS = {"numpy": "auto", "numpy without native": "no-native", "torch": "auto", "jax": "auto"}
BACKENDS |= {"array_api_strict": "auto"}


def no_floor(magnitude: float) -> float:
    return 0.0


def one(magnitude: float) -> float:
    return 1.0


class Case(NamedTuple):
    """Arguments of an operation, and how it is compared.

    `exponents` are the decimal exponents that the magnitude of the first argument may have in float32. `floor` returns
    the size of the terms that cancel in derivatives, given this magnitude: the derivative of a softmax of one class is
    their rounding error. `output_floor` does the same for the output: gelu(-1e12) is 0 compared with 1e12.
    """

    function: Callable[..., Any]
    arrays: Callable[[Any, np.random.Generator], list[Any]]
    exponents: tuple[int, int] = (-45, 38)
    floor: Callable[[float], float] = no_floor
    output_floor: Callable[[float], float] = no_floor


def slope(magnitude: float) -> float:
    """Return the derivative of a norm, at most 1 / sqrt(epsilon)."""
    return 1.0 / max(magnitude, 0.01)


def size(draw: Any, largest: int = 70) -> int:
    return draw(st.integers(1, 8) | st.integers(1, largest))


def rows(draw: Any, rng: np.random.Generator) -> Any:
    return rng.normal(size=(size(draw, 40), size(draw, 300)))


def make_softmax(draw, rng):
    x = rows(draw, rng)
    mask = draw(st.sampled_from(["none", "all", "some", "one row"]))
    if mask == "none":
        return [x]
    keep = np.ones(x.shape, bool) if mask == "all" else rng.random(x.shape) < 0.6
    return [x, np.zeros_like(keep) | (np.arange(len(keep))[:, None] > 0) if mask == "one row" else keep]


def make_norm(bias):
    def make(draw, rng):
        x = rng.normal(size=(size(draw, 40), 8 + size(draw, 300)))  # the variance of a few features may be near zero
        return [x, *rng.normal(size=(1 + bias, x.shape[1]))]

    return make


def make_linear(draw, rng):
    x = rng.normal(size=(*draw(st.sampled_from([(), (1,), (3,)])), size(draw), size(draw, 300)))
    weight = rng.normal(size=(x.shape[-1], size(draw))) / np.sqrt(x.shape[-1])
    return [x, weight, *([rng.normal(size=weight.shape[1])] if draw(st.booleans()) else [])]


def make_projection(draw, rng):
    heads, head_dim = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 8, 16]))
    x = rng.normal(size=(size(draw, 4), size(draw, 40), size(draw, 64)))
    return [x, rng.normal(size=(x.shape[-1], heads * head_dim)) / np.sqrt(x.shape[-1])]


def make_attention(draw, rng):
    batch, heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2]))
    queries, keys, head_dim = size(draw, 150), size(draw, 150), draw(st.sampled_from([4, 8, 16, 64]))
    q = rng.normal(size=(batch, heads * group, queries, head_dim))
    k, v = rng.normal(size=(2, batch, heads, keys, head_dim))
    mask = draw(st.sampled_from(["none", "padding", "full"]))
    if mask == "none":
        return [q, k, v]
    if mask == "padding":
        return [q, k, v, np.arange(keys) < rng.integers(0, keys + 1, (batch, 1, 1, 1))]
    return [q, k, v, rng.random((batch, 1, queries, keys)) < 0.7]


def make_cross_entropy(draw, rng):
    x = rows(draw, rng)
    return [x, rng.integers(0, x.shape[1], len(x))]


def make_embedding(draw, rng):
    weight = rows(draw, rng)
    return [weight, rng.integers(0, len(weight), (size(draw, 4), size(draw, 30)))]


def make_dropout(draw, rng):
    x = rows(draw, rng)
    return [x, rng.random(x.shape) < 0.8]


def make_rotation(draw, rng):
    heads, length, half, rest = size(draw, 4), size(draw), size(draw), size(draw, 8)
    x = rng.normal(size=(1, heads, length, 2 * half + rest - 1))
    return [x, *rng.integers(-127, 128, (2, length, half))]


def rotate_by_fractions(x: Any, *numerators: Any) -> Any:
    xp = array_namespace(x)
    return rotate(x, *(xp.astype(each, x.dtype) / 128 for each in numerators))  # exact in every dtype


def causal_attention(q: Any, k: Any, v: Any) -> Any:
    length = min(q.shape[2], k.shape[2])
    return attention(q, k[:, :, :length, :], v[:, :, :length, :], causal=True)


CASES = {
    "relu": Case(relu, lambda draw, rng: [rows(draw, rng)]),
    "gelu": Case(gelu, lambda draw, rng: [rows(draw, rng)], (-38, 37), one, float),
    "gelu_tanh": Case(gelu_tanh, lambda draw, rng: [rows(draw, rng)], (-38, 12), one, float),
    "silu": Case(silu, lambda draw, rng: [rows(draw, rng)], (-38, 37), one, float),
    "softmax": Case(softmax, make_softmax, floor=one),
    "layer_norm": Case(layer_norm, make_norm(True), (-45, 16), slope),
    "rms_norm": Case(rms_norm, make_norm(False), (-45, 16), slope),
    "linear": Case(linear, make_linear, (-30, 17)),
    "project_heads": Case(lambda x, w: project_heads(x, (w, None, 2 - w.shape[1] % 2))[0], make_projection, (-30, 17)),
    "attention": Case(attention, make_attention, (-30, 0), one),
    "attention, causal": Case(causal_attention, lambda draw, rng: make_attention(draw, rng)[:3], (-30, 0), one),
    "cross_entropy": Case(cross_entropy, make_cross_entropy, (-45, 37), one, one),
    "embedding": Case(embedding, make_embedding),
    "rotate": Case(rotate_by_fractions, make_rotation, (-37, 37)),
    "dropout": Case(lambda x, mask: dropout(x, mask, 0.8), make_dropout, (-37, 37)),
}


@contextlib.contextmanager
def kernels(mode: str) -> Iterator[None]:
    old = os.environ.get("XFORMER_KERNELS", "auto")
    os.environ["XFORMER_KERNELS"] = mode
    clear_cache()
    try:
        yield
    finally:
        os.environ["XFORMER_KERNELS"] = old
        clear_cache()


def outputs(function: Any, arrays: list[Any], dtype: Any) -> list[Any]:
    """Return the output, the output of the differentiated call, and the cotangents of the floating arguments.

    The cotangent of the output is rounded to `dtype`.
    """
    indices = [index for index, array in enumerate(arrays) if is_floating(array.dtype)]

    def of_floating(*floating: Any) -> Any:
        values = dict(zip(indices, floating, strict=True))
        return function(*(values.get(index, array) for index, array in enumerate(arrays)))

    first = function(*arrays)
    output, pull = vjp(of_floating, *(arrays[index] for index in indices))
    g = np.random.default_rng(1).normal(size=output.shape).astype(dtype)
    return [first, output, *pull(from_host(array_namespace(first), g, dtype=output.dtype))]


def error(actual: Any, expected: Any, dtype: str, floor: float) -> float:
    """Return the largest difference, relative to the largest expected value that the dtype has and to `floor`."""
    info = np.finfo("float32" if dtype == "bfloat16" else dtype)
    actual = np.asarray(to_host(actual), np.float64)
    fits = np.abs(expected) < 0.99 * float(info.max)
    assert np.isfinite(actual[fits]).all()
    differences = np.abs(actual - expected)[fits]
    scale = max(np.abs(expected[fits]).max(initial=0.0), float(info.tiny) / float(info.eps), floor)
    return float(differences.max(initial=0.0) / scale)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=4 * settings().max_examples)
@given(library=st.sampled_from(["numpy", "numpy without native", "torch", "array_api_strict"]), data=st.data())
def test_operations_agree_with_float64(library, name, data):
    compare(library, name, data)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=settings().max_examples // 5)  # JAX compiles each shape
@given(data=st.data())
def test_operations_of_jax_agree_with_float64(name, data):
    compare("jax", name, data)


def compare(library: str, name: str, data: Any) -> None:
    xp = library_or_skip(library.split()[0])
    case = CASES[name]
    dtype = data.draw(st.sampled_from(["float32", "float32", "float64", "float16", "bfloat16"]))
    if "16" in dtype and library == "array_api_strict":  # it has no such dtypes
        dtype = "float32"
    if dtype == "bfloat16" and library.startswith("numpy"):
        pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    hosts = case.arrays(data.draw, rng)
    low, high = case.exponents
    if library == "jax":
        low = max(low, -30)  # XLA replaces subnormal numbers by zero
    if dtype == "float16":
        low, high = max(low, -4), min(high, 1)
    magnitude = 10.0 ** data.draw(st.just(0) | st.integers(low, high))
    hosts[0] = np.clip(hosts[0] * magnitude, -3e38, 3e38)
    numpy_dtype = resolve("numpy").dtype_named(dtype)
    hosts = [host.astype(numpy_dtype) if host.dtype.kind == "f" else host for host in hosts]
    with np.errstate(all="ignore"), kernels("portable"):
        wide = [host.astype("float64") if is_floating(host.dtype) else host for host in hosts]
        expected = outputs(case.function, wide, numpy_dtype)
    with np.errstate(all="ignore"), kernels(BACKENDS[library]):
        actual = outputs(case.function, [from_host(xp, host) for host in hosts], numpy_dtype)
    for index, (x, y) in enumerate(zip(actual, expected, strict=True)):
        assert dtype_name(x.dtype) == ("float32" if name == "cross_entropy" and index < 2 and "16" in dtype else dtype)
        largest = error(x, np.asarray(y), dtype, (case.floor if index >= 2 else case.output_floor)(magnitude))
        key = (name, "forward" if index < 2 else "derivative", library, dtype)
        LARGEST_ERRORS[key] = max(largest, LARGEST_ERRORS.get(key, 0.0))
        assert largest <= TOLERANCES[dtype], (index, magnitude, [host.shape for host in hosts])


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "softmax", "layer_norm", "rms_norm", "linear"])
@settings(max_examples=3 * settings().max_examples)
@given(library=st.sampled_from(["numpy", "numpy without native", "torch"]), data=st.data())
def test_values_that_are_not_finite_stay_in_their_rows(library, name, data):
    xp = library_or_skip(library.split()[0])
    arrays = CASES[name].arrays(data.draw, np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))))
    arrays = [array.astype("float32") if array.dtype.kind == "f" else array for array in arrays]
    damaged = [arrays[0].copy(), *arrays[1:]]
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    damaged[0].reshape(-1, arrays[0].shape[-1])[0, 0] = value
    before, after = (outputs_by_row(CASES[name].function, xp, each, BACKENDS[library]) for each in (arrays, damaged))
    np.testing.assert_array_equal(after[1:], before[1:])
    if np.isnan(value) and (name != "softmax" or len(arrays) == 1):
        assert np.isnan(after[0]).any()


def outputs_by_row(function: Any, xp: Any, arrays: list[Any], mode: str) -> Any:
    with np.errstate(all="ignore"), kernels(mode):
        y = to_host(function(*(from_host(xp, array) for array in arrays)))
    return y.reshape(-1, y.shape[-1])
