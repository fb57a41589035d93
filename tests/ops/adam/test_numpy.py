"""Adam and the squared norm on NumPy: results equal those of the portable definitions."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.ops.numpy_cases import (
    DTYPES,
    LAYOUTS,
    TOLERANCES,
    assert_same,
    assert_selected,
    memory_orders,
    normal,
    with_layout,
)
from xformer import ops
from xformer.ops.adam import adam
from xformer.ops.squared_norm import squared_norm

pytestmark = pytest.mark.usefixtures("no_native")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_squared_norm(monkeypatch, layout, dtype):
    assert_selected("squared_norm", with_layout(layout, dtype))
    assert_same(monkeypatch, squared_norm, with_layout(layout, dtype))
    assert_same(monkeypatch, squared_norm, with_layout(layout, dtype), normal(3).astype(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("which", range(4))
def test_twenty_steps_of_adam(monkeypatch, dtype, weight_decay, which):
    start = list(memory_orders(dtype))[which]
    zeros = np.zeros_like(start)
    assert_selected("adam", None, start.copy("K"), start, zeros.copy("K"), zeros.copy("K"), weight_decay=(0.0,))
    ends = []
    for mode in (os.environ["XFORMER_KERNELS"], "portable"):
        monkeypatch.setenv("XFORMER_KERNELS", mode)
        arrays = (start.copy("K"), zeros.copy("K"), zeros.copy("K"))
        for step in range(1, 21):
            gradient = np.sin(step * start)
            gradient.flags.writeable = False
            (arrays,) = adam(
                [(arrays[0], gradient, *arrays[1:])],
                learning_rate=0.01,
                step=step,
                beta1=0.9,
                beta2=0.98,
                epsilon=1e-9,
                weight_decay=[weight_decay],
                grad_scale=np.asarray(0.625) if weight_decay else None,
            )
        ends.append(arrays)
    for actual, expected in zip(*ends, strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_allclose(actual, expected, rtol=0.0, atol=TOLERANCES[dtype])


def test_adam_supports_writable_arrays_in_one_memory_order():
    parameter, zeros = normal(4, 3), np.zeros((4, 3))
    parameter.flags.writeable = False
    assert "read-only" in ops.explain("adam", None, parameter, zeros, zeros.copy(), zeros.copy())
    mixed = np.asfortranarray(zeros)
    assert "memory order" in ops.explain("adam", None, normal(4, 3), zeros, mixed, zeros.copy())
    every_other = np.zeros((4, 6))[:, ::2]
    assert "contiguous" in ops.explain("adam", None, every_other, zeros, zeros.copy(), zeros.copy())


def test_adam_takes_a_gradient_in_another_memory_order(monkeypatch):
    parameter, gradient = normal(4, 3), normal(4, 3, seed=1)
    ends = []
    for same_gradient in (gradient, np.asfortranarray(gradient)):
        moments = np.zeros((4, 3)), np.zeros((4, 3))
        assert_selected("adam", None, parameter.copy(), same_gradient, *moments, weight_decay=(0.0,))
        row = parameter.copy(), same_gradient, *moments
        ends.append(adam([row], learning_rate=0.1, step=1, beta1=0.9, beta2=0.98, epsilon=1e-9)[0])
    np.testing.assert_array_equal(ends[0], ends[1])
