"""Calls that repeat enqueue what the first of their kind enqueued, and give the bits that any call gives."""

from __future__ import annotations

import math
import types
import weakref

import numpy as np
import pytest

from tests.ops.cases import TABLE
from tests.ops.replace_kernels import kernels_by_operation, replace_kernels
from tests.reference import for_each
from xformer import environment, ops
from xformer.backends.arrays import CHECKED_CLASSES
from xformer.backends.library import NAMESPACE_OF_TYPE, Library
from xformer.backends.numpy import NumpyLibrary
from xformer.errors import ShapeError
from xformer.kernels.cupy import attention as cupy_attention
from xformer.kernels.cupy import calls, elementwise, launch
from xformer.layers import Linear
from xformer.ops import attention, layer_norm, linear, project_heads, relu
from xformer.ops.operation import Operation
from xformer.ops.weights import QuantizedWeight
from xformer.tree import replace


class DeviceArray(np.ndarray):
    """An array with the address and the device that CuPy's have, at a multiple of 256 bytes plus an offset."""

    device_id = 0

    def __new__(cls, shape, dtype, offset=0):
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        memory = np.empty(nbytes + 512, np.uint8)
        start = -memory.ctypes.data % 256 + offset
        return memory[start : start + nbytes].view(dtype).reshape(shape).view(cls)

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self.ctypes.data, device_id=self.device_id)


def on_device(x, offset=0):
    array = DeviceArray(x.shape, x.dtype, offset)
    array[...] = x
    return array


@pytest.fixture
def device(cuda_host, monkeypatch):
    """Let NumPy arrays go the way of CuPy's; return the device that is current."""
    device = types.SimpleNamespace(current=0, launched=cuda_host.launcher.launched)

    def compiled(kernel, dtypes):
        return lambda grid, block, arguments: cuda_host.launcher.launch(kernel, dtypes, *grid, *block, *arguments)

    monkeypatch.setitem(NAMESPACE_OF_TYPE, DeviceArray, cuda_host.xp)
    monkeypatch.setattr("xformer.backends.arrays.CHECKED_CLASSES", {*CHECKED_CLASSES, DeviceArray})
    monkeypatch.setattr(NumpyLibrary, "apply", lambda self, *arguments: calls.apply(self, *arguments))
    monkeypatch.setattr(NumpyLibrary, "other_device", lambda self, arrays: None)
    monkeypatch.setattr(launch, "launch", LAUNCH)
    monkeypatch.setattr(launch, "_compiled", compiled)
    monkeypatch.setattr(calls, "_get_device", lambda: lambda: device.current)
    monkeypatch.setattr(calls, "pointer", lambda array: array.ctypes.data)
    monkeypatch.setattr(calls, "view", lambda x, offset, shape, strides: np.ndarray(shape, x.dtype, x, offset, strides))
    monkeypatch.setattr(calls, "_THREAD", calls._Thread())
    return device


LAUNCH = launch.launch


def values(hosts, dtype, seed):
    """Arrays of other values, but the same ids, labels and masks."""
    rng = np.random.default_rng(seed)
    floats = launch.resolve("numpy").dtype_named(dtype)
    return [
        on_device((x + rng.normal(size=x.shape)).astype(floats) if (x := np.asarray(host)).dtype.kind == "f" else x)
        for host in hosts
    ]


def repeated(operation):
    return [call for key, call in calls._THREAD.calls.items() if key[0].name == operation and call.steps]


@pytest.mark.parametrize("operation", TABLE)
@for_each("dtype", ["float32", "bfloat16"])
def test_every_operation_gives_the_same_bits_again(device, monkeypatch, operation, dtype):
    for function, options, *hosts in TABLE[operation]:
        device.launched.clear()
        function(*values(hosts, dtype, 0), **options)
        first, arrays = [*device.launched], values(hosts, dtype, 1)
        device.launched.clear()
        again = np.asarray(function(*arrays, **options))
        assert device.launched == first
        with monkeypatch.context() as context:
            context.setattr(NumpyLibrary, "apply", Library.apply)
            expected = np.asarray(function(*arrays, **options))
        assert again.dtype == expected.dtype
        np.testing.assert_array_equal(again, expected)
    assert repeated(operation) or operation == "squared_norm"  # whose kernel gets a table of addresses


@pytest.mark.parametrize("kernel", cupy_attention.KERNELS, ids=lambda kernel: kernel.name)
@for_each("has_bias, has_mask", [(False, False), (False, True), (True, False), (True, True)])
def test_attention_gives_the_same_bits_again(device, monkeypatch, kernel, has_bias, has_mask):
    own = kernels_by_operation("numpy") | {"attention": [kernel._replace(why_not=None)]}
    replace_kernels(monkeypatch, "numpy", own)
    shapes = [(2, 3, 5, 8)] * 3, (2, 3, 5, 5)
    results = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        query, key, value, bias = (on_device(rng.normal(size=x).astype("f")) for x in (*shapes[0], shapes[1]))
        mask = on_device(rng.random(shapes[1]) < 0.7) if has_mask else None
        arrays = query, key, value, mask, bias if has_bias else None
        results = [np.asarray(attention(*arrays)) for _ in range(2)]
    with monkeypatch.context() as context:
        context.setattr(NumpyLibrary, "apply", Library.apply)
        expected = np.asarray(attention(*arrays))
    for result in results:
        np.testing.assert_array_equal(result, expected)


X, W, B = (np.random.default_rng(seed).normal(size=shape) for seed, shape in enumerate([(4, 6), (6, 8), (8,)]))


def chosen(monkeypatch):
    """Return the list of operations for which a kernel is chosen from now on."""
    names, original = [], Operation.select

    def select(self, *arguments, **options):
        names.append(self.name)
        return original(self, *arguments, **options)

    monkeypatch.setattr(Operation, "select", select)
    return names


def test_a_kernel_is_chosen_once_for_dtypes_shapes_strides_alignment_and_device(device, monkeypatch):
    names = chosen(monkeypatch)
    x, w, b = values([X, W, B], "float32", 0)
    same = lambda: linear(x, w, b)  # noqa: E731
    other = [
        lambda: linear(x, w),
        lambda: linear(x[:3], w, b),
        lambda: linear(x[::-1], w, b),
        lambda: linear(on_device(x, 16), w, b),
        lambda: linear(x, w, b, activation="relu"),
        lambda: linear(*values([X, W, B], "bfloat16", 0)),
    ]
    for call in (same, *other):
        names.clear()
        for _ in range(3):
            np.testing.assert_array_equal(call(), call())
        assert names == ["linear"]
    names.clear()
    device.current = 1
    same()
    assert names == ["linear"]
    environment.clear_cache()  # kernels may be switched off now
    same()
    assert names == ["linear"] * 2


def test_weights_that_are_neighbors_are_multiplied_at_once_only_if_they_are(device):
    x, *parameters = values([np.ones((2, 3, 6)), np.ones((6, 12)), np.ones(12)], "float32", 0)
    w, b = (np.array(parameter).view(DeviceArray) for parameter in parameters)  # which own their memory

    def project(weights, biases):
        return project_heads(x, *((w, b, 2) for w, b in zip(weights, biases, strict=True)))

    def columns(array):
        return [array[..., start : start + 4] for start in (0, 4, 8)]

    expected = project([on_device(part) for part in columns(w)], [on_device(part) for part in columns(b)])
    apart = [columns(np.array(w).view(DeviceArray))[index] for index in range(3)]
    for weights in (columns(w), columns(w), apart, columns(w)):
        for result, correct in zip(project(weights, columns(b)), expected, strict=True):
            np.testing.assert_allclose(result, correct, rtol=1e-5)
    assert any(call.distances for call in repeated("project_heads"))


def test_arrays_that_cannot_be_told_apart_are_not_recorded(device):
    x, w = values([X, X[0]], "float32", 0)
    np.testing.assert_array_equal(layer_norm(x, w, w), layer_norm(x, w, on_device(w)))
    np.testing.assert_array_equal(layer_norm(x, w, w), layer_norm(x, w, on_device(w)))
    other = on_device(w + 1)
    np.testing.assert_array_equal(layer_norm(x, w, other), layer_norm(*map(on_device, (x, w, other))))


def test_results_do_not_share_memory_and_no_array_is_kept(device):
    arrays = values([X, W, B], "float32", 0)
    results = [linear(*arrays, activation="relu") for _ in range(2)]
    assert not np.may_share_memory(*results)
    kept = [weakref.ref(array) for array in (*arrays, *results)]
    del arrays, results
    assert not any(reference() is not None for reference in kept)


@for_each("rows", [2, 40])
def test_products_with_quantized_weights_repeat(device, rows):
    weight = QuantizedWeight(
        *values([np.arange(9) / 8, np.arange(108, dtype="int8").reshape(9, 12)], "float32", 0), True
    )
    pairs = [values([np.ones((rows, 12)), np.ones(9)], "float32", seed) for seed in range(2)]
    results = [linear(x, weight, bias) for x, bias in pairs]
    assert len(repeated("quantized_linear")) == 1
    for (x, bias), y in zip(pairs, results, strict=True):
        np.testing.assert_allclose(y, x @ weight.dequantize() + bias, rtol=1e-4)
    calls._THREAD.calls.clear()


def test_no_array_of_an_expert_is_kept(device):
    weights = values([X.T @ X], "float32", 0)
    maps = [replace(Linear(6, 6, bias=False, init=0), {"weight": weight}) for weight in weights]
    ops.apply_experts(on_device(X.astype("float32")), on_device(np.zeros(4, np.int64)), maps)
    kept = weakref.ref(weights[0])
    del weights, maps
    assert kept() is None


def test_calls_that_do_not_match_the_signature_raise_each_time(device):
    x, w, _ = values([X, W, B], "float32", 0)
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"^linear got "):
            linear(w, x)


def test_explain_lists_calls_that_repeat(device):
    x, w, b = values([X, W, B], "float32", 0)
    linear(x, w, b), linear(x, w, b)
    assert ops.explain(lambda: linear(x, w, b)) == "linear on numpy: cupy.linear"


def test_a_call_that_fails_records_nothing(device, monkeypatch):
    (x,) = values([X], "float32", 0)
    with monkeypatch.context() as context:
        context.setattr(elementwise, "empty", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            relu(x)
    assert calls._THREAD.recording is None
    np.testing.assert_array_equal(relu(x), np.maximum(x, 0))
