"""Activation functions of large and infinite numbers: values and derivatives are finite, or their limits."""

from __future__ import annotations

import numpy as np
import pytest

from xformer import vjp
from xformer.ops import gelu, gelu_tanh, relu, silu


@pytest.mark.parametrize("mode", ["auto", "portable"])
@pytest.mark.parametrize("function", [relu, gelu, gelu_tanh, silu])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_limits(function, dtype, mode, monkeypatch):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    x = np.asarray([-np.inf, -1e30, -300.0, 300.0, 1e30, np.inf], dtype)
    with np.errstate(all="ignore"):
        output, pull = vjp(function, x)
        (slope,) = pull(np.ones_like(x))
    np.testing.assert_allclose(output, [0.0, 0.0, 0.0, *x[3:]], atol=1e-20)
    np.testing.assert_allclose(slope, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0], atol=1e-20)
