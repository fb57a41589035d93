"""Properties of all CuPy kernels: they are selected, never wait for the GPU, and do not write to their inputs."""

from __future__ import annotations

import importlib
import json
import sys
import types

import numpy as np
import pytest

from tests.conftest import library_or_skip
from tests.ops._cupy.cuda_cases import normal
from tests.ops.replace_kernels import kernels_by_operation, replace_kernels
from tests.reference import for_each, small_model, translation_loss
from xformer import Rng, jit, ops, training, value_and_grad, vjp
from xformer.backends import Library, array_namespace, resolve, to_host
from xformer.backends import cupy as cupy_backend
from xformer.backends import library as libraries
from xformer.backends.cupy import CupyLibrary
from xformer.backends.numpy import NumpyLibrary
from xformer.kernels.cupy import launch as cuda_launch
from xformer.ops.activations import ACTIVATIONS
from xformer.ops.experts import Expert
from xformer.ops.operation import OPERATIONS, kernels_of
from xformer.ops.optimizers import Settings
from xformer.training import Adam, AdamW, Batch, TokenPairs
from xformer.training.precision import autocast
from xformer.training.step import clip_scale, global_norm, train_step
from xformer.tree import flatten, map_arrays

ROWS, FEATURES, CLASSES = (3, 4), 8, 11
X, MATRIX, VECTOR = normal(*ROWS, FEATURES), normal(FEATURES, FEATURES, seed=1), normal(FEATURES, seed=2)
IDS, KEEP = np.arange(12).reshape(ROWS) % CLASSES, X > 0
CASES = {
    "layer_norm": ((X, VECTOR, VECTOR), {"epsilon": 1e-5}),
    "rms_norm": ((X, VECTOR), {"epsilon": 1e-5}),
    "add_norm": ((X, X[::-1], VECTOR, VECTOR), {"epsilon": 1e-5, "centered": True, "keep_sum": True}),
    **dict.fromkeys(ACTIVATIONS, ((X,), {})),
    "dropout": ((X, KEEP), {"keep_probability": 0.5}),
    "gated": ((X, X[::-1]), {"activation": "silu"}),
    "choose": ((X[0], VECTOR[:4]), {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01}),
    "logsumexp": ((X,), {}),
    "top_k": ((X,), {"k": 3}),
    "rotate": ((normal(2, 3, 5, FEATURES), normal(5, 2), normal(5, 2)), {}),
    "embedding": ((normal(CLASSES, FEATURES), IDS), {"scale": 2.5}),
    "softmax": ((X, KEEP[:, :1]), {}),
    "cross_entropy": ((normal(*ROWS, CLASSES), IDS), {"pad_id": 0, "label_smoothing": 0.1, "z_loss": 0.1}),
    "linear": ((X, MATRIX, VECTOR), {"relu": True}),
    "project_heads": ((X, MATRIX, VECTOR, MATRIX, VECTOR), {"heads": (2, 4)}),
    "quantized_linear": ((X[0], VECTOR, np.round(20 * MATRIX).astype("int8"), VECTOR), {}),
    "experts": (
        (X[0], np.asarray([0, 0, 1, 1]), MATRIX, VECTOR, MATRIX, VECTOR),
        {"experts": (Expert(2, lambda arrays: lambda rows: ops.linear(rows, *arrays), frozenset(), True),) * 2},
    ),
    "squared_norm": ((X, VECTOR), {}),
    "cast": ((X, VECTOR), {"dtype": "float32"}),
    "adam": (
        (np.asarray(0.5), VECTOR, VECTOR, VECTOR, VECTOR**2),
        {"settings": Settings(0.1, 0.9, 0.9, 1.0, 1e-9, 0.1), "weight_decay": (0.9,), "donate": True},
    ),
}


class Watched(np.ndarray):
    """An array that would have to wait for a GPU if it were read."""

    def _read(self, *_, **__):
        raise AssertionError("a value is read on the host")

    __float__ = __int__ = __index__ = __bool__ = __iter__ = __contains__ = __array_function__ = _read
    item = tolist = tobytes = _read


class Namespace:
    """NumPy's functions for arrays that are watched."""

    def __init__(self, xp):
        self._xp = xp

    def __getattr__(self, name):
        found = getattr(self._xp, name)
        if isinstance(found, type) or not callable(found) or hasattr(Library, name):
            return found
        return lambda *arguments, **settings: found(*map(plain, arguments), **settings).view(Watched)


def plain(x):
    return x.view(np.ndarray) if isinstance(x, Watched) else x


def device_array(host, dtype):
    """A watched array that must not be written."""
    array = (host.astype(dtype) if host.dtype.kind == "f" else host.copy()).view(Watched)
    array.flags.writeable = False
    return array


@pytest.fixture
def watching(cuda_host, monkeypatch):
    monkeypatch.setitem(libraries.NAMESPACE_OF_TYPE, Watched, Namespace(cuda_host.xp))
    return cuda_host


def test_there_is_a_case_for_every_kernel(cuda_host):
    in_test_decoding = {"attention", "cached_attention"}
    assert set(kernels_by_operation("numpy")) - in_test_decoding == set(CASES)


@for_each("dtype", ["float32", "bfloat16"])
@for_each("operation", CASES)
def test_kernels_do_not_read_on_the_host_or_write_to_their_inputs(watching, operation, dtype):
    hosts, static = CASES[operation]
    arrays = [device_array(host, watching.xp.dtype_named(dtype)) for host in hosts]
    if operation == "adam":  # which works in place
        arrays = [
            array.astype(watching.xp.dtype_named(dtype if place in (1, 2) else "float32"))
            for place, array in enumerate(arrays)
        ]
    (kernel,) = kernels_of(operation, "numpy")
    assert kernel.refusal(tuple(arrays), static, dtype, save=kernel.vjp is not None) is None
    output, residuals = kernel.forward(*arrays, save=True, **static)
    if kernel.vjp is not None:
        several = isinstance(output, tuple)
        g = [device_array(np.ones(each.shape), each.dtype) for each in (output if several else (output,))]
        needs = [array.dtype.kind != "b" and array.dtype != IDS.dtype for array in arrays]
        if operation in ("rotate", "quantized_linear"):  # by constant angles, and weights
            needs[1:3] = False, False
        cotangents = kernel.vjp(g if several else g[0], residuals, tuple(needs), **static)
        assert [cotangent is not None for cotangent in cotangents] == needs
    assert watching.launcher.launched or operation in ("linear", "project_heads")  # which may call cuBLAS alone


@for_each("operation", CASES)
def test_explain_names_our_kernel(cuda, operation):
    importlib.import_module("xformer.training")  # an operation is known once it is imported
    hosts, static = CASES[operation]
    name = "numpy" if cuda.launcher else "cupy"
    said = ops.explain(operation, *(cuda.array(host, "float64") for host in hosts), **static)
    assert f"{operation} on {name}: cupy.{operation}" in said.splitlines()


@pytest.mark.parametrize("operation", CASES)
def test_arrays_on_another_device_are_not_supported(cuda_host, monkeypatch, operation):
    monkeypatch.setattr(cuda_launch, "is_current_device", lambda array: False)
    (kernel,) = kernels_of(operation, "numpy")
    hosts, static = CASES[operation]
    assert kernel.refusal(hosts, static, "float64", save=False) == "arrays are on cpu, which is not the current device"


class Place:
    """A device; entered: how often a thread has switched to it, and is_current, whether it is there now."""

    def __init__(self):
        self.entered, self.is_current = 0, False

    def __enter__(self):
        self.entered, self.is_current = self.entered + 1, True

    def __exit__(self, *_):
        self.is_current = False


@pytest.mark.parametrize("operation", ["gelu", "softmax", "project_heads", "gelu_tanh"])
def test_operations_run_on_the_device_of_their_arrays(cuda_host, monkeypatch, operation):
    """Forward and backward, by kernels and by definitions."""
    place, (hosts, static) = Place(), CASES.get(operation, ((X,), {}))
    arrays = [cuda_host.array(host, "float32") for host in hosts]
    results = []
    for other in (None, place):
        monkeypatch.setattr(
            NumpyLibrary, "other_device", lambda self, arrays, other=other: None if place.is_current else other
        )
        monkeypatch.setattr(
            cuda_launch, "is_current_device", lambda array, other=other: other is None or place.is_current
        )
        output, pull = vjp(lambda *args: OPERATIONS[operation](*args, **static), *arrays)
        results.append([*flatten(output)[0], *flatten(pull(output))[0]])
        assert "not the current device" not in ops.explain(operation, *arrays, **static)
    assert place.entered == 4  # to choose a kernel, in both directions, and to explain
    assert not place.is_current
    for actual, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_a_jitted_function_runs_on_the_device_of_its_arrays(monkeypatch):
    """Where a stream of another device would capture nothing."""
    place = Place()
    monkeypatch.setattr(NumpyLibrary, "other_device", lambda self, arrays: place if list(arrays) else None)
    seen = []
    assert jit(lambda x: seen.append(place.is_current) or x * 2.0)(np.ones(2)).tolist() == [2.0, 2.0]
    assert set(seen) == {True}


def test_cupy_says_which_arrays_are_elsewhere(monkeypatch):
    library = CupyLibrary("cupy", resolve("numpy").module)
    array, mask = np.ones(2), library.random_mask
    monkeypatch.setattr(cuda_launch, "is_current_device", lambda array: True)
    assert library.other_device([None, array]) is None
    monkeypatch.setattr(cuda_launch, "is_current_device", lambda array: False)
    assert library.other_device([None, array]) == array.device
    assert library.other_device([]) is None
    place = Place()
    monkeypatch.setattr(cuda_launch, "launch", lambda *_: results.append(place.is_current))
    results = []
    mask(1, 5, (3,), place)
    library.counted_random_mask(1, np.asarray(1), 5, (3,), place)
    mask(1, 5, (3,), None)
    assert results == [True, True, False]


@pytest.mark.parametrize("operation", CASES)
def test_no_kernel_is_switched_off_at_its_first_use(cuda, monkeypatch, tmp_path, operation):
    importlib.import_module("xformer.training")
    hosts, static = CASES[operation]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if cuda.launcher:
        monkeypatch.setattr(NumpyLibrary, "kernel_identity", lambda self: "a GPU", raising=False)
    monkeypatch.setattr(array_namespace(cuda.array(hosts[0], "float32")), "kernels", {})
    for dtype in ("float32", "bfloat16", "float64"):
        arrays = [cuda.array(host, dtype) for host in hosts]
        if operation == "adam" and dtype == "bfloat16":
            continue  # whose moments are float32
        xp = array_namespace(*arrays)
        name = OPERATIONS[operation].signature.check(operation, tuple(arrays))
        has_vjp = OPERATIONS[operation].definition.vjp is not None
        kernel = OPERATIONS[operation].select(xp, arrays, static, name, save=has_vjp)
        assert kernel.name == f"cupy.{operation}"
    (verdicts,) = json.loads((tmp_path / "xformer" / "kernel_checks.json").read_text()).values()
    assert {*verdicts.values()} == {""}


@pytest.mark.parametrize("settings", [{"activation": "relu"}, {"activation": "gelu", "norm": "rms"}])
def test_three_training_steps_equal_those_of_the_portable_definitions(cuda_host, monkeypatch, settings):
    """Dropout, tied embeddings, smoothed labels and clipping included; attention is the portable one."""

    def updates():
        # A small epsilon would make as much of rounding as of gradients: some biases have the derivative zero.
        model, optimizer, losses = small_model(dropout=0.1, **settings), AdamW(epsilon=1e-3), []
        state = optimizer.init(model)
        for step in range(3):
            loss, gradients = value_and_grad(translation_loss)(model, rng=Rng(step))
            norm = global_norm(gradients)
            scale = clip_scale(loss, norm, 0.5)
            model, state = optimizer.update(model, gradients, state, 0.01, scale, donate=True)
            losses += [float(loss), float(norm)]
        return losses, flatten(model)[0]

    losses, arrays = updates()
    launched = {name.split("<")[0] for name in cuda_host.launcher.launched}
    replace_kernels(monkeypatch, "numpy", {})
    expected, expected_arrays = updates()
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for array, correct in zip(arrays, expected_arrays, strict=True):
        np.testing.assert_allclose(array, correct, rtol=0, atol=1e-10)
    assert launched >= {"norms.normalize_vjp", "optimizer.adam", "columns.scale_rows"}
    assert launched >= {
        "elementwise.activation_vjp",
        "elementwise.dropout",
        "embedding.scatter_segments",
    }


ROWS_OF_IDS = [[5, 4, 7, 2], [3, 10, 2]]


def test_a_training_step_copies_nothing_from_the_host(cuda_host, monkeypatch):
    """Such a copy could not be captured in a graph; the first step may make tables that are kept."""
    cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(getDevice=lambda: 0),
        get_current_stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
    )
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(cupy_backend, "_TABLES", {})
    monkeypatch.setitem(libraries._LIBRARIES, "cupy", resolve("numpy"))  # it is not imported
    for function in (CupyLibrary.random_mask, CupyLibrary.counted_random_mask, CupyLibrary.rows_of_table):
        on_current_device = lambda *given, function=function: function(*given[:-1], device=None)  # noqa: E731
        monkeypatch.setattr(NumpyLibrary, function.__name__, on_current_device)
    copies, place = [], NumpyLibrary._place
    monkeypatch.setattr(
        NumpyLibrary, "_place", lambda self, data, *rest: copies.append(data) or place(self, data, *rest)
    )
    model, optimizer = small_model(positions="sinusoidal", dropout=0.1, dtype="float32"), Adam()
    batch = Batch.make(TokenPairs(ROWS_OF_IDS, ROWS_OF_IDS), [0, 1], xp=np)
    state = optimizer.init(model)
    for number in range(2):
        del copies[:]
        options = {"loss_fn": training.translation_loss, "optimizer": optimizer, "learning_rate": 0.01}
        model, state, *_ = train_step(model, state, [batch], Rng(number), **options)
    assert not copies


@pytest.mark.parametrize("library", ["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_a_captured_training_step_can_be_replayed_with_other_numbers(library):
    """On NumPy the step runs as it is. Learning rate, step, loss scale and random counter are scalar arrays."""
    xp = library_or_skip(library)
    capture = xp.graph_capture() or (lambda step: step)
    optimizer = AdamW(weight_decay=0.1)
    batch = Batch.make(TokenPairs(ROWS_OF_IDS, ROWS_OF_IDS), [0, 1], xp=xp)
    options = {"loss_fn": training.translation_loss, "optimizer": optimizer, "max_grad_norm": 0.5, "donate": True}
    numbers = [(0.01, 1.0), (0.02, 4.0), (0.03, 2.0), (0.01, 2.0), (0.02, 8.0)]  # learning rates and loss scales
    start = small_model(xp, dropout=0.1)
    model, expected = map_arrays(lambda x: xp.asarray(x, copy=True), start), []
    state = optimizer.init(model)
    for number, (rate, scale) in enumerate(numbers):
        rng = Rng(5).with_counter(xp.asarray(number))
        model, state, loss, norm = train_step(
            model, state, [batch], rng, learning_rate=rate, loss_scale=scale, **options
        )
        expected.append([float(loss), float(norm)])
    rate, scale, step, loss, norm = (xp.zeros((), dtype=xp.float64) for _ in range(5))
    counter, captured, captured_state = xp.asarray(0), start, optimizer.init(start)

    def work(copy=None):
        result = train_step(
            captured,
            captured_state._replace(step=step),
            [batch],
            Rng(5).with_counter(counter),
            learning_rate=rate,
            loss_scale=scale,
            **options,
        )
        loss[...], norm[...] = result.loss, result.grad_norm
        assert result.model is captured  # updated in place, as is the step
        counter[...] = counter + 1

    replay = capture(work)
    for (new_rate, new_scale), values in zip(numbers, expected, strict=True):
        rate[...], scale[...] = new_rate, new_scale
        replay()
        np.testing.assert_allclose([float(loss), float(norm)], values, rtol=1e-9)
    for array, correct in zip(flatten(captured)[0], flatten(model)[0], strict=True):
        np.testing.assert_allclose(to_host(array), to_host(correct), rtol=0, atol=1e-9)


SPIN = """
extern "C" __global__ void spin(long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


@pytest.mark.gpu
@for_each("dtype", ["float32", "bfloat16"])
def test_a_step_does_not_wait_for_the_gpu(dtype):
    """Forward, backward, clipping and update are all launched while the GPU still does something else."""
    cupy = library_or_skip("cupy")
    spin, busy, waited = cupy.RawModule(code=SPIN).get_function("spin"), cupy.cuda.Event(), []

    class Watched(AdamW):
        def update(self, *args, **options):
            updated = super().update(*args, **options)
            waited.append(busy.done)
            return updated

    model = small_model(cupy, dtype="float32", d_model=64, num_heads=1, dropout=0.1)
    rows = [[5, 4, 7, 2], [3, 10, 2]]
    batch = Batch.make(TokenPairs(rows, rows), [0, 1], xp=cupy)
    loss, optimizer = autocast(dtype, training.translation_loss), Watched()
    state = optimizer.init(model)
    for number in range(6):  # compiles, and asks for memory, which fits better from step to step
        if number == 5:
            cupy.cuda.Device().synchronize()
            spin((1,), (1,), (5_000_000_000,))  # some seconds
        busy.record()
        options = {"loss_fn": loss, "optimizer": optimizer, "learning_rate": 0.01, "max_grad_norm": 0.01}
        result = train_step(model, state, [batch], Rng(number), **options, donate=True)
        model, state = result.model, result.state
    assert not waited[5]
