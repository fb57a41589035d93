"""The check of kernels accepts those of the native library for rows and elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ops.native_cases import kernels, needs_library, single  # noqa: F401
from xformer import jit, ops, vjp
from xformer.backends import array_namespace
from xformer.ops import checks

pytestmark = needs_library


def test_the_check_of_kernels_passes(monkeypatch):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    monkeypatch.setattr(checks, "_CHECKED", set())
    x, y = single(6, 8), single(2, 2, 5, 4)
    calls = {
        "adam": lambda: ops.adam(
            [(x, x, x.copy(), x * x)], learning_rate=0.1, step=1, beta1=0.9, beta2=0.98, epsilon=1e-9
        ),
        "cross_entropy": lambda: ops.cross_entropy(x, np.arange(6), label_smoothing=0.1),
        "dropout": lambda: ops.dropout(x, x > 0, 0.5),
        "embedding": lambda: ops.embedding(x, np.asarray([1, 2, 1]), scale=2.0),
        "gelu": lambda: ops.gelu(x),
        "gelu_tanh": lambda: ops.gelu_tanh(x),
        "layer_norm": lambda: ops.layer_norm(x, x[0], x[1]),
        "relu": lambda: ops.relu(x),
        "rms_norm": lambda: ops.rms_norm(x, x[0]),
        "rotate": lambda: ops.rotate(y, y[0, 0, :, :2], y[0, 1, :, :2]),
        "silu": lambda: ops.silu(x),
        "softmax": lambda: ops.softmax(x, x > 0),
        "squared_norm": lambda: ops.squared_norm(x, y),
    }
    for call in calls.values():
        call()
    assert {f"native.{name}" for name in calls} == checks._CHECKED


# Functions of arrays without axes, or with results without axes, which NumPy's functions return as scalars.
SCALARS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{name: (getattr(ops, name), (0.7,)) for name in ops.activations.ACTIVATIONS},
    "dropout": (lambda x: ops.dropout(x, np.bool_(True), 0.8), (0.7,)),
    "cross_entropy": (lambda x: 3.0 * ops.cross_entropy(x, np.int64(1)), ([0.1, 0.7, -0.2],)),
    "embedding": (lambda weight: ops.embedding(weight, np.int64(1)), ([[0.1], [0.7]],)),
    "logsumexp": (lambda x: x * ops.logsumexp(np.float32(0.5) * np.ones(1, np.float32))[0], (0.7,)),
    "squared_norm": (lambda x, y: 3.0 * ops.squared_norm(x, y), (0.7, [0.1, -0.2])),
}


@pytest.mark.parametrize("make", [np.asarray, lambda x: np.asarray(x)[()]], ids=["array", "scalar"])
@pytest.mark.parametrize("name", SCALARS)
def test_scalars_of_numpy_are_arrays_without_axes(name, make):
    def doubled(*arrays):
        y = function(*arrays)
        return array_namespace(y).sum(y * 2.0)  # its cotangent is a scalar

    function, values = SCALARS[name]
    results = []
    for dtype in ("float64", "float32"):
        arrays = [make(np.asarray(value, dtype)) for value in values]
        value, pull = vjp(doubled, *arrays)
        assert value.dtype == dtype
        results.append((function(*arrays), jit(function)(*arrays), value, *pull(make(np.asarray(1.0, dtype)))))
    for wide, single_precision in zip(*results, strict=True):
        np.testing.assert_allclose(single_precision, wide, rtol=1e-6)


def test_subclasses_of_arrays_have_the_kernels_of_numpy(tmp_path):
    x = single(3, 4)
    on_disk = np.memmap(tmp_path / "x", np.float32, "w+", shape=x.shape)
    on_disk[...] = x
    np.testing.assert_allclose(ops.relu(on_disk), ops.relu(x))
    assert "not native.relu: an array is a memmap" in ops.explain("relu", on_disk)
