"""Batched products on CuPy: correct arguments of cuBLAS for every memory layout of the operands."""

from __future__ import annotations

import itertools
import types

import numpy as np
import pytest

from tests.conftest import TOLERANCES, library_or_skip
from tests.kernels.cupy.fake_cublas import DTYPES, HANDLE, Binding, dtype_named
from xformer.kernels.cupy import cublas, plans
from xformer.kernels.cupy.cublas import batched_product


@pytest.fixture
def fake_cublas(monkeypatch):
    binding = Binding()
    monkeypatch.setattr(cublas, "binding_and_handle", lambda: (binding, HANDLE))
    monkeypatch.setattr(cublas, "pointer", lambda array: array.ctypes.data)
    return binding


def normal(*shape, seed=0, dtype="float64"):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype_named(dtype))


def assert_product(a, b, **options):
    out = batched_product(a, b, **options)
    exact = options.get("alpha", 1.0) * (a.astype("float64") @ b.astype("float64"))
    assert out.dtype == options.get("dtype", a.dtype)
    assert out.flags.c_contiguous
    tolerance = max(TOLERANCES[a.dtype.name], TOLERANCES[out.dtype.name]) * max(1.0, np.max(np.abs(exact), initial=0))
    np.testing.assert_allclose(out.astype("float64"), exact, rtol=0.0, atol=tolerance)
    return out


@pytest.mark.parametrize("setting", ["", "0", "1"])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_tf32_applies_to_float32_only_if_requested(monkeypatch, fake_cublas, dtype, setting):
    monkeypatch.setenv("XFORMER_TF32", setting)
    assert_product(normal(2, 3, 4, dtype=dtype), normal(2, 4, 5, dtype=dtype))
    (call,) = fake_cublas.calls
    assert (call["computeType"] == 77) == (dtype == "float32" and setting == "1")


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize(
    ("sizes", "batch"),
    [
        ((3, 4, 5), ()),
        ((1, 4, 5), (3,)),
        ((3, 1, 5), (2, 3)),
        ((3, 4, 1), (1, 3)),
        ((1, 1, 1), (2, 1)),
        ((17, 9, 33), (3,)),
    ],
    ids=str,
)
def test_any_size_and_dtype(fake_cublas, dtype, sizes, batch):
    m, k, n = sizes
    assert_product(normal(*batch, m, k, dtype=dtype), normal(*batch, k, n, seed=1, dtype=dtype), alpha=0.3)
    assert len(fake_cublas.calls) == 1


@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("sizes", [(3, 4, 5), (3, 0, 5), (0, 4, 5)], ids=str)
def test_a_product_is_added_to_the_addend(fake_cublas, dtype, sizes):
    m, k, n = sizes
    a, b, more = normal(m, k, dtype=dtype), normal(k, n, seed=1, dtype=dtype), normal(m, n, seed=2, dtype=dtype)
    exact = a.astype("float64") @ b.astype("float64") + more.astype("float64")
    out = batched_product(a, b, addend=more)
    assert out is more
    np.testing.assert_allclose(out.astype("float64"), exact, rtol=0.0, atol=4 * TOLERANCES[dtype])


def test_an_addend_of_another_shape_dtype_or_order_is_refused(fake_cublas):
    a, b = normal(3, 4), normal(4, 5)
    for more in (normal(5), normal(3, 5, dtype="float32"), np.asfortranarray(normal(3, 5))):
        with pytest.raises(ValueError, match=r"addend is .*; expected \(3, 5\) float64 in C order"):
            batched_product(a, b, addend=more)
    assert not fake_cublas.calls


# Matrices (2, 3, 4, 5) in other memory, and whether cuBLAS can read them there.
MEMORY = {
    "packed": (normal(2, 3, 4, 5), True),
    "turned": (normal(2, 3, 5, 4).swapaxes(-1, -2), True),
    "wide rows": (normal(2, 3, 4, 9)[..., 2:7], True),
    "wide columns": (normal(2, 3, 5, 7).swapaxes(-1, -2)[..., 1:5, :], True),
    "part of the rows": (normal(2, 3, 6, 5)[:, :, :4], True),
    "one for all": (np.broadcast_to(normal(4, 5), (2, 3, 4, 5)), True),
    "heads after rows": (normal(2, 4, 3, 5).transpose(0, 2, 1, 3), False),
    "heads after rows, turned": (normal(2, 5, 3, 4).transpose(0, 2, 3, 1), False),
    "every other column": (normal(2, 3, 4, 10)[..., ::2], False),
    "backwards": (normal(2, 3, 4, 5)[..., ::-1, :], False),
    "batches backwards": (normal(2, 3, 4, 5)[::-1, ::-1], False),
    "one row for all": (np.broadcast_to(normal(2, 3, 1, 5), (2, 3, 4, 5)), False),
    "one head for all": (np.broadcast_to(normal(2, 1, 4, 5), (2, 3, 4, 5)), False),
}


@pytest.mark.parametrize(
    ("left", "right"), [*((name, "packed") for name in MEMORY), *(("turned", name) for name in MEMORY)]
)
def test_operands_are_copied_only_if_necessary(fake_cublas, left, right):
    (a, a_stays), (b, b_stays) = MEMORY[left], MEMORY[right]
    b = b.swapaxes(-1, -2)
    assert_product(a, b)
    (call,) = fake_cublas.calls  # the second operand of cuBLAS is the first of the product
    assert (call["B"] == a.ctypes.data) == a_stays
    assert (call["A"] == b.ctypes.data) == b_stays


def test_heads_of_one_sentence_are_not_copied(fake_cublas):
    query, key = (normal(1, length, 3, 8, seed=length).transpose(0, 2, 1, 3) for length in (4, 5))
    assert_product(query, key.swapaxes(-1, -2))
    (call,) = fake_cublas.calls
    assert (call["B"], call["A"]) == (query.ctypes.data, key.ctypes.data)
    assert (call["transa"], call["transb"], call["lda"], call["ldb"]) == (1, 0, 24, 24)
    assert (call["m"], call["n"], call["k"], call["batchCount"]) == (5, 4, 8, 3)
    assert (call["strideA"], call["strideB"], call["strideC"]) == (8, 8, 20)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operands_of_16_bits_can_give_a_float32_result(fake_cublas, dtype):
    a, b = normal(2, 3, 40, dtype=dtype), normal(2, 40, 5, seed=1, dtype=dtype)
    out = assert_product(a, b, dtype=np.dtype("float32"), alpha=0.1)
    np.testing.assert_allclose(out, 0.1 * (a.astype("float64") @ b.astype("float64")), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", list(itertools.product([0, 2], [0, 3], [0, 4])), ids=str)
def test_empty_products(fake_cublas, sizes):
    m, k, n = sizes
    for batch in (0, 2):
        assert_product(normal(batch, m, k), normal(batch, k, n))
    assert len(fake_cublas.calls) == (0 not in sizes)


@pytest.mark.parametrize("other", [normal(2, 4, 5), normal(3, 3, 5), normal(2, 3, 5).astype("float32")])
def test_operands_that_do_not_match_are_refused(fake_cublas, other):
    with pytest.raises(ValueError, match=r"^operands \(2, 4, 3\) float64 and .*; expected"):
        batched_product(normal(2, 4, 3), other)
    assert not fake_cublas.calls


@pytest.mark.parametrize("batch", [1, 3])
def test_the_arguments_of_the_c_functions(monkeypatch, batch):
    calls = {}

    def function(name, status=0):
        return lambda *given: calls.update({name: given}) or status

    names = "cublasSetStream_v2", "cublasGemmEx", "cublasGemmStridedBatchedEx"
    library = types.SimpleNamespace(**{name: function(name) for name in names})
    monkeypatch.setattr(plans, "current", lambda: (0, 54321))
    a, b, c = ("A", 14, 8, 80), ("B", 14, 9, 90), ("C", 0, 7, 70)  # address, type, leading dimension, step
    given = 0, 1, 2, 3, 4, "alpha", *a, *b, "beta", *c, batch, 68, -1
    cublas._Direct(library).gemmStridedBatchedEx(12345, *given)
    assert calls.pop("cublasSetStream_v2") == (12345, 54321)
    one = 0, 1, 2, 3, 4, "alpha", *a[:3], *b[:3], "beta", *c[:3], 68, -1
    assert calls == ({names[1]: (12345, *one)} if batch == 1 else {names[2]: (12345, *given)})
    for name, arguments in calls.items():
        assert len(getattr(library, name).argtypes) == len(arguments)
    setattr(library, names[1 if batch == 1 else 2], function("failing", 13))
    with pytest.raises(RuntimeError, match="cuBLAS returned status 13"):
        cublas._Direct(library).gemmStridedBatchedEx(12345, *given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES.values())
@pytest.mark.parametrize("memory", MEMORY)
def test_on_the_gpu(dtype, memory):
    cupy = library_or_skip("cupy")
    a = MEMORY[memory][0].astype(dtype_named(dtype))
    b = normal(2, 3, 5, 7, seed=1, dtype=dtype)
    out = batched_product(cupy.asarray(a), cupy.asarray(b), alpha=0.3)
    exact = 0.3 * (a.astype("float64") @ b.astype("float64"))
    np.testing.assert_allclose(out.get().astype("float64"), exact, rtol=0, atol=5 * TOLERANCES[dtype])
