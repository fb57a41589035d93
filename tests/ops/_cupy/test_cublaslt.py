"""Linear maps by cuBLASLt: correct arguments for every memory layout, and a fallback for unsupported products."""

from __future__ import annotations

import gc
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import TOLERANCES, library_or_skip
from tests.ops._cupy.cuda_cases import normal
from tests.ops._cupy.fake_cublas import dtype_named
from tests.ops.conftest import use_fake_cublas
from tests.reference import for_each
from xformer import environment, vjp
from xformer.backends import to_host
from xformer.kernels.cupy import cublaslt, launch
from xformer.kernels.cupy.cublaslt import affine, gradients
from xformer.ops import linear

REFUSED, NO_MEMORY, FAILING = 13, 1013, 1014  # columns, to the stand-in
NARROW = ["float32", "float16", "bfloat16"]


@pytest.fixture
def products(fake_cublaslt, monkeypatch):
    use_fake_cublas(fake_cublaslt, monkeypatch)
    return fake_cublaslt


def arrays(m, k, n, dtype="float32"):
    return [normal(*shape, seed=seed).astype(dtype_named(dtype)) for seed, shape in enumerate([(m, k), (k, n), (n,)])]


def assert_affine(rows, weight, bias, *, relu=False):
    got = affine(rows, weight, bias, relu=relu)
    exact = rows.astype("float64") @ weight.astype("float64") + bias.astype("float64")
    exact = np.maximum(exact, 0.0) if relu else exact
    assert got.dtype == rows.dtype
    assert got.flags.c_contiguous
    tolerance = TOLERANCES[rows.dtype.name] * max(1.0, np.max(np.abs(exact)))
    np.testing.assert_allclose(got.astype("float64"), exact, rtol=0.0, atol=tolerance)


@for_each("relu", [False, True])
@for_each("dtype", NARROW)
@for_each("sizes", [(3, 4, 5), (1, 4, 5), (3, 1, 5), (3, 4, 1), (17, 40, 24)])
def test_any_size_and_dtype(products, sizes, dtype, relu):
    assert_affine(*arrays(*sizes, dtype), relu=relu)


def assert_gradients(rows, g_rows):
    weight, bias = gradients(rows, g_rows, None)
    wide_rows, wide_g = (to_host(array).astype("float64") for array in (rows, g_rows))
    for got, exact in ((weight, wide_rows.T @ wide_g), (bias, wide_g.sum(axis=0))):
        assert got.dtype == rows.dtype
        assert got.flags.c_contiguous
        tolerance = 2.0 * TOLERANCES[rows.dtype.name] * max(1.0, np.max(np.abs(exact)))
        np.testing.assert_allclose(to_host(got).astype("float64"), exact, rtol=0.0, atol=tolerance)


@for_each("dtype", NARROW)
@for_each("sizes", [(3, 4, 5), (1, 4, 5), (3, 1, 1), (40, 17, 24)])
def test_gradients_of_weight_and_bias(products, sizes, dtype):
    m, k, n = sizes
    rows, g_rows = (normal(m, size, seed=size).astype(dtype_named(dtype)) for size in (k, n))
    assert_gradients(rows, g_rows)
    assert_gradients(np.asfortranarray(rows), np.asfortranarray(g_rows))


def test_the_gradient_of_a_bias_needs_no_launch(cuda_host):
    x, weight, bias = (cuda_host.array(each) for each in arrays(3, 4, 5))
    y, pull = vjp(linear, x, weight, bias)
    pull(y)
    assert not cuda_host.launcher.launched


@pytest.mark.filterwarnings("ignore:cuBLASLt failed")
def test_gradients_of_an_unsupported_product(cuda_host):
    x, weight, bias = arrays(3, 4, REFUSED)
    y, pull = vjp(linear, x, weight, bias)
    for got, exact in zip(pull(y), (y @ weight.T, x.T @ y, y.sum(axis=0)), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
    assert any(name.startswith("columns.column_sums") for name in cuda_host.launcher.launched)


@pytest.fixture
def clock(products, monkeypatch, tmp_path):
    """Measure all products, with scripted times: the milliseconds of the ways, and the ways that were measured."""
    found = SimpleNamespace(times=[], measured=[], is_capturing=False, path=tmp_path / "xformer/fastest_products.json")

    def milliseconds(start, end):
        found.measured.append(end)
        return found.times[(len(found.measured) - 1) // 2 % len(found.times)]

    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    stream = SimpleNamespace(is_capturing=lambda: found.is_capturing)
    stub = SimpleNamespace(Event=lambda: event, get_current_stream=lambda: stream, get_elapsed_time=milliseconds)
    monkeypatch.setattr(cublaslt, "cuda", lambda: stub)
    monkeypatch.setattr(launch, "device_properties", lambda device: ("H100", 90))
    monkeypatch.setattr(cublaslt, "_MIN_OPERATIONS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment.clear_cache()
    yield found
    monkeypatch.undo()
    environment.clear_cache()


def chosen(monkeypatch, separate=("apart",)):
    """Compute gradients in a new thread's cache of plans; return the place of the algorithm, or what `separate` is."""
    monkeypatch.setattr(cublaslt, "_plans", launch.Plans(9))
    rows, g_rows = (normal(6, size, seed=size).astype("float32") for size in (4, 5))
    result = gradients(rows, g_rows, lambda: separate)
    if result is separate:
        return separate
    np.testing.assert_allclose(result[0], rows.T @ g_rows, rtol=1e-5, atol=1e-6)
    (plan,) = cublaslt._plans._plans.values()
    return next(place for place, each in enumerate(plan._algorithms) if each is plan.best)


def test_the_fastest_way_is_measured_once_and_kept(clock, monkeypatch):
    """The third algorithm of the stand-in fails; the first is taken unless another is clearly faster."""
    clock.times = [3.0, 1.0, 2.0]
    assert [chosen(monkeypatch), len(clock.measured)] == [1, 6]
    assert json.loads(clock.path.read_text())["H100, cuBLASLt 130000"].popitem()[1] == 1
    clock.times = [3.0, 2.0, 1.0]
    assert [chosen(monkeypatch), len(clock.measured)] == [1, 6]
    environment.clear_cache()  # as in another process
    assert [chosen(monkeypatch), len(clock.measured)] == [1, 6]
    for content in ("{", "[]", '{"H100, cuBLASLt 130000": 5}', clock.path.read_text().replace(": 1", ": 9")):
        clock.path.write_text(content)
        clock.measured.clear()
        environment.clear_cache()
        assert [chosen(monkeypatch), len(clock.measured)] == [("apart",), 6]
    clock.path.unlink()
    clock.times = [1.0, 0.99, 0.98]
    environment.clear_cache()
    assert chosen(monkeypatch) == 0


def test_nothing_is_measured_while_a_graph_captures(clock, monkeypatch):
    clock.is_capturing, clock.times = True, [3.0, 1.0, 2.0]
    assert [chosen(monkeypatch), clock.measured, clock.path.exists()] == [0, [], False]
    clock.is_capturing = False
    rows = np.ones((6, 4), "float32")
    gradients(rows, np.ones((6, 5), "float32"), tuple)  # the same plan
    assert clock.path.exists()


def test_any_memory(products):
    rows, weight, bias = arrays(6, 8, 10)
    assert_affine(rows, np.asfortranarray(weight), bias)
    assert_affine(np.asfortranarray(rows), weight, bias)
    assert_affine(np.repeat(rows, 2, axis=0)[::2], np.tile(weight, 2)[:, :10], np.repeat(bias, 2)[::2])
    assert_affine(np.repeat(rows, 2, axis=1)[:, ::2], weight, bias)  # no leading dimension says this: it is copied
    memory = np.empty(rows.size + 1, np.float32)
    moved = memory[1:].reshape(rows.shape)
    moved[...] = rows
    assert_affine(moved, weight, bias)  # at an address of another alignment


def test_a_plan_is_made_once_for_a_shape(products, monkeypatch):
    monkeypatch.setattr(cublaslt, "_ALIGNED_TO", (2,))
    rows, weight, bias = arrays(6, 40, 10)
    outputs = [affine(rows, weight, each) for each in (bias, bias, bias.copy())]
    np.testing.assert_array_equal(outputs[0], outputs[1])
    assert_affine(rows, weight, bias + 1.0)  # the address of the bias is told anew
    assert len(list(cublaslt._plans)) == 1


def test_descriptors_are_destroyed(products, monkeypatch):
    gc.collect()
    before = products.alive_descriptors()
    cublaslt._plans.max_plans = 2
    monkeypatch.setattr(cublaslt, "_ALIGNED_TO", (2,))
    for m in range(1, 6):
        affine(*arrays(m, 4, 5))
    gc.collect()
    assert products.alive_descriptors() - before == 2 * 5


@for_each("activation", [None, "relu"])
def test_an_unsupported_product_warns_once_and_falls_back(cuda_host, activation):
    rows, weight, bias = arrays(3, 4, REFUSED)
    with pytest.warns(
        RuntimeWarning, match=r"cuBLASLt failed for \(3, 4\) by \(4, 13\), float32; the bias takes another pass"
    ):
        got = linear(rows, weight, bias, activation=activation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(linear(rows, weight, bias, activation=activation), got)
    expected = rows @ weight + bias
    np.testing.assert_allclose(got, np.maximum(expected, 0.0) if activation else expected, rtol=1e-5, atol=1e-6)
    assert "elementwise.add<float32>" in cuda_host.launcher.launched


@for_each("columns, status", [(NO_MEMORY, "ALLOC_FAILED"), (FAILING, "EXECUTION_FAILED")])
def test_errors_other_than_an_unsupported_product_are_raised(products, columns, status):
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^cublasLtMatmul\w* returned CUBLAS_STATUS_{status}$"):
            affine(*arrays(3, 4, columns))


@pytest.mark.parametrize("why", ["float64", "empty", "no library"])
def test_unsupported_products(products, monkeypatch, why):
    if why == "no library":
        monkeypatch.setattr(cublaslt, "library", lambda: None)
    assert affine(*arrays(0 if why == "empty" else 3, 4, 5, "float64" if why == "float64" else "float32")) is None


@for_each("dtype", NARROW)
def test_a_residual_connection_passes_nan_in_spite_of_relu(cuda, dtype):
    """The ReLU of cuBLASLt is 0 for NaN, according to NVIDIA's forum (topic 329783); so is the stand-in's."""
    x, up, bias = (cuda.array(each, dtype) for each in arrays(64, 32, 48))
    down, down_bias = (cuda.array(each, dtype) for each in arrays(1, 48, 32)[1:])
    x[3, 5], x[4, 5] = np.nan, np.inf
    hidden = linear(x, up, bias, activation="relu")
    got = to_host(hidden)
    assert np.isnan(got[3]).all() or not got[3].any()
    assert np.isinf(got[4]).any()
    assert np.isfinite(got[5:]).all()
    assert np.isnan(to_host(x[3:4] + linear(hidden[3:4], down, down_bias))).any()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:cuBLASLt failed")
@for_each("relu", [False, True])
@for_each("dtype", NARROW)
@for_each("sizes", [(64, 32, 48), (1, 512, 2048), (1000, 512, 8000), (7, 9, 11)])
def test_on_a_gpu(sizes, dtype, relu):
    cupy = library_or_skip("cupy")
    rows, weight, bias = (cupy.asarray(each) for each in arrays(*sizes, dtype))
    if sizes != (7, 9, 11):  # which may be refused
        assert affine(rows, weight, bias, relu=relu) is not None
    got = to_host(linear(rows, weight, bias, activation="relu" if relu else None)).astype("float64")
    exact = to_host(rows).astype("float64") @ to_host(weight).astype("float64") + to_host(bias).astype("float64")
    exact = np.maximum(exact, 0.0) if relu else exact
    np.testing.assert_allclose(got, exact, rtol=0.0, atol=2.0 * TOLERANCES[dtype] * max(1.0, np.max(np.abs(exact))))
