"""The check of kernels accepts those of the native library for rows and elements."""

from __future__ import annotations

import numpy as np

from tests.ops.native_cases import kernels, needs_library, single  # noqa: F401
from xformer import ops
from xformer.ops import kernel_check

pytestmark = needs_library


def test_the_check_of_kernels_passes(monkeypatch):
    monkeypatch.setenv("XFORMER_CHECK_KERNELS", "1")
    monkeypatch.setattr(kernel_check, "_CHECKED", set())
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
    assert {f"native.{name}" for name in calls} == kernel_check._CHECKED
