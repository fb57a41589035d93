"""Batched products on CuPy: correct arguments of cuBLAS for every memory layout of the operands."""

from __future__ import annotations

import itertools
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TOLERANCES, library_or_skip
from tests.ops._cupy import cuda_on_host
from tests.ops._cupy.fake_cublas import DTYPES, HANDLE, Binding, dtype_named
from tests.reference import for_each
from xformer.backends import array_namespace
from xformer.errors import is_out_of_memory
from xformer.kernels.cupy import cublas, launch
from xformer.kernels.cupy.cublas import batched_product
from xformer.threads import setting


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


@for_each("dtype", DTYPES.values())
@for_each(
    "sizes, batch",
    [
        ((3, 4, 5), ()),
        ((1, 4, 5), (3,)),
        ((3, 1, 5), (2, 3)),
        ((3, 4, 1), (1, 3)),
        ((1, 1, 1), (2, 1)),
        ((17, 9, 33), (3,)),
    ],
)
def test_any_size_and_dtype(fake_cublas, dtype, sizes, batch):
    fake_cublas.calls.clear()
    m, k, n = sizes
    assert_product(normal(*batch, m, k, dtype=dtype), normal(*batch, k, n, seed=1, dtype=dtype), alpha=0.3)
    assert len(fake_cublas.calls) == 1


@for_each("dtype", DTYPES.values())
@for_each("sizes", [(3, 4, 5), (3, 0, 5), (0, 4, 5)])
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
# A memory order for matrices (2, 3, 4, 5): the shape in memory, the view of it, and whether cuBLAS takes the view.
MEMORY = {
    "packed": ((2, 3, 4, 5), lambda x: x, True),
    "turned": ((2, 3, 5, 4), lambda x: x.swapaxes(-1, -2), True),
    "wide rows": ((2, 3, 4, 9), lambda x: x[..., 2:7], True),
    "wide columns": ((2, 3, 5, 7), lambda x: x.swapaxes(-1, -2)[..., 1:5, :], True),
    "part of the rows": ((2, 3, 6, 5), lambda x: x[:, :, :4], True),
    "one for all": ((4, 5), lambda x: array_namespace(x).broadcast_to(x, (2, 3, 4, 5)), True),
    "heads after rows": ((2, 4, 3, 5), lambda x: x.transpose(0, 2, 1, 3), False),
    "heads after rows, turned": ((2, 5, 3, 4), lambda x: x.transpose(0, 2, 3, 1), False),
    "every other column": ((2, 3, 4, 10), lambda x: x[..., ::2], False),
    "backwards": ((2, 3, 4, 5), lambda x: x[..., ::-1, :], False),
    "batches backwards": ((2, 3, 4, 5), lambda x: x[::-1, ::-1], False),
    "one row for all": ((2, 3, 1, 5), lambda x: array_namespace(x).broadcast_to(x, (2, 3, 4, 5)), False),
    "one head for all": ((2, 1, 4, 5), lambda x: array_namespace(x).broadcast_to(x, (2, 3, 4, 5)), False),
}


def in_memory(name):
    shape, view, stays = MEMORY[name]
    return view(normal(*shape)), stays


@for_each("left, right", [*((name, "packed") for name in MEMORY), *(("turned", name) for name in MEMORY)])
def test_operands_are_copied_only_if_necessary(fake_cublas, left, right):
    fake_cublas.calls.clear()
    (a, a_stays), (b, b_stays) = in_memory(left), in_memory(right)
    b = b.swapaxes(-1, -2)
    assert_product(a, b)
    (call,) = fake_cublas.calls  # the second operand of cuBLAS is the first of the product
    assert (call["B"] == a.ctypes.data) == a_stays
    assert (call["A"] == b.ctypes.data) == b_stays


@for_each("name, transposed", [("heads after rows", 0), ("heads after rows, turned", 1)])
def test_copies_keep_the_memory_order(name, transposed):
    x, _ = in_memory(name)
    copy = cublas.operand(x)
    assert copy.transposed == transposed
    assert copy.array.swapaxes(-1, -2 if transposed else -1).flags.c_contiguous
    np.testing.assert_array_equal(copy.array, x)


@for_each("sizes", list(itertools.product([0, 2], [0, 3], [0, 4])))
def test_empty_products(fake_cublas, sizes):
    fake_cublas.calls.clear()
    m, k, n = sizes
    for batch in (0, 2):
        assert_product(normal(batch, m, k), normal(batch, k, n))
    assert len(fake_cublas.calls) == (0 not in sizes)


@for_each("other", [normal(2, 4, 5), normal(3, 3, 5), normal(2, 3, 5).astype("float32")])
def test_operands_that_do_not_match_are_refused(fake_cublas, other):
    with pytest.raises(ValueError, match=r"^operands \(2, 4, 3\) float64 and .*; expected"):
        batched_product(normal(2, 4, 3), other)
    assert not fake_cublas.calls


@pytest.fixture
def calls(monkeypatch):
    """A cuBLAS library that only notes the arguments of its functions, and these."""
    calls = {}

    def function(name):
        return lambda *arguments: calls.update({name: arguments}) or 0

    names = ["cublasSetStream_v2", "cublasSetWorkspace_v2"]
    names += "cublasGemmEx", "cublasGemmStridedBatchedEx", "cublasGemmBatchedEx"
    library = types.SimpleNamespace(**{name: function(name) for name in names})
    monkeypatch.setattr(launch, "current", lambda: (0, 54321))
    return library, calls


A, B, C = ("A", 14, 8, 80), ("B", 14, 9, 90), ("C", 0, 7, 70)  # address, type, leading dimension, step
SIZES = 0, 1, 2, 3, 4, "alpha"


@for_each("batch", [1, 3])
def test_the_arguments_of_the_c_functions(calls, batch):
    library, calls = calls
    calls.clear()
    arguments = *SIZES, *A, *B, "beta", *C, batch, 68, -1
    cublas._Direct(library).gemmStridedBatchedEx(12345, *arguments)
    assert calls.pop("cublasSetStream_v2") == (12345, 54321)
    one = *SIZES, *A[:3], *B[:3], "beta", *C[:3], 68, -1
    name = "cublasGemmEx" if batch == 1 else "cublasGemmStridedBatchedEx"
    assert calls == {name: (12345, *(one if batch == 1 else arguments))}
    assert len(getattr(library, name).argtypes) == len(calls[name])


def test_the_arguments_of_products_at_addresses(calls):
    library, calls = calls
    arguments = 12345, *SIZES, *A[:3], *B[:3], "beta", *C[:3], 5, 68, -1
    cublas._Direct(library).gemmBatchedEx(*arguments)
    assert calls["cublasGemmBatchedEx"] == arguments
    assert len(library.cublasGemmBatchedEx.argtypes) == len(arguments)


def test_products_under_capture_use_the_workspace_of_the_graph(calls):
    library, calls = calls
    binding = cublas._Direct(library)
    with setting(cublas.WORKSPACE, (4096, 64)):
        binding.gemmStridedBatchedEx(12345, *SIZES, *A, *B, "beta", *C, 1, 68, -1)
    assert list(calls) == ["cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasGemmEx"]
    assert calls.pop("cublasSetWorkspace_v2") == (12345, 4096, 64)
    binding.gemmStridedBatchedEx(12345, *SIZES, *A, *B, "beta", *C, 1, 68, -1)
    assert "cublasSetWorkspace_v2" not in calls  # cublasSetStream resets the workspace


@for_each(
    "status, name, is_unsupported",
    [(3, "ALLOC_FAILED", False), (13, "EXECUTION_FAILED", False), (15, "NOT_SUPPORTED", True), (99, "99", False)],
)
def test_errors_name_the_function_and_the_status(calls, status, name, is_unsupported):
    library, _ = calls
    library.cublasGemmEx = lambda *arguments: status
    with pytest.raises(cublas.CublasError, match=f"^cublasGemmEx returned CUBLAS_STATUS_{name}$") as raised:
        cublas._Direct(library).gemmStridedBatchedEx(12345, *SIZES, *A, *B, "beta", *C, 1, 68, -1)
    assert raised.value.is_unsupported == is_unsupported
    assert is_out_of_memory(raised.value) == (status == 3)


FIRST_CALL = """
import ctypes, sys, types
import numpy as np
from xformer.ops import linear
from xformer.kernels.cupy import cublas, cublaslt, launch
from xformer.kernels.cupy.linear import KERNELS
from xformer.ops.operation import OPERATIONS, load_kernels

def get_cublas_handle():  # loads cuBLAS, as CuPy does
    loaded.append(ctypes.CDLL(sys.argv[1]))
    return 12345

loaded = []
runtime = types.SimpleNamespace(runtimeGetVersion=lambda: 13020)
cuda = types.SimpleNamespace(device=types.SimpleNamespace(get_cublas_handle=get_cublas_handle), runtime=runtime)
launch.cuda = cublas.cuda = lambda: cuda
cublas.pointer = lambda array: array.ctypes.data
launch.current = lambda: (0, 54321)
load_kernels("numpy")
OPERATIONS["linear"].kernels["numpy"] = KERNELS
launch.is_current_device = lambda array: True
x, weight = np.arange(6, dtype="float32").reshape(2, 3), np.arange(12, dtype="float32").reshape(3, 4)
np.testing.assert_array_equal(linear(x, weight), x @ weight)
assert type(cublas._binding()) is cublas._Direct
assert loaded
"""


def test_the_first_product_of_a_process_loads_the_library(tmp_path):
    """CuPy loads cuBLAS when it makes its first handle."""
    if cuda_on_host.COMPILER is None:
        pytest.skip("g++ is not installed")
    code, library = Path(__file__).with_name("fake_cublas.cpp"), tmp_path / "cublas.so"
    options = ["-O1", "-fPIC", "-shared", "-Wl,-soname,libcublas.so.13", "-o", str(library)]
    subprocess.run([cuda_on_host.COMPILER, *options, str(code)], check=True)
    command = [sys.executable, "-c", FIRST_CALL, str(library)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


FIRST_CALL_ON_A_GPU = """
import cupy
from xformer.kernels.cupy import cublas
from xformer.ops import linear
assert linear(cupy.ones((2, 3)), cupy.ones((3, 4))).get().tolist() == [[3.0] * 4] * 2
assert type(cublas._binding()) is cublas._Direct
"""


@pytest.mark.gpu
def test_the_first_product_of_a_process_on_a_gpu():
    library_or_skip("cupy")
    result = subprocess.run([sys.executable, "-c", FIRST_CALL_ON_A_GPU], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
