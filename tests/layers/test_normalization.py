"""Norms: equal to torch's, and safe for the largest numbers of half precision."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close, library_or_skip
from tests.reference import normal, weighted_sum
from xformer import Initializer, value_and_grad
from xformer.backends import dtype_name, from_host, to_host
from xformer.layers import LayerNorm, MaxScaledLayerNorm, RMSNorm
from xformer.tree import replace


def test_rms_norm_and_its_gradients_equal_those_of_torch(xp):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    x, weight, g = normal(0, 2, 5, 8), normal(1, 8), normal(2, 2, 5, 8)
    torch_x, torch_weight = (torch.tensor(array, requires_grad=True) for array in (x, weight))
    expected = torch.nn.functional.rms_norm(torch_x, (8,), torch_weight, eps=1e-3)
    (expected * torch.tensor(g)).sum().backward()
    layer = RMSNorm(8, epsilon=1e-3, init=Initializer(xp, dtype="float64"))
    layer = replace(layer, {"weight": from_host(xp, weight)})
    assert_close(layer(from_host(xp, x)), expected.detach().numpy(), xp=xp)
    _, (actual, dx) = value_and_grad(lambda inputs: weighted_sum(inputs[0](inputs[1]), from_host(xp, g)))(
        (layer, from_host(xp, x))
    )
    assert_close(dx, torch_x.grad.numpy(), xp=xp)
    assert_close(actual.weight, torch_weight.grad.numpy(), xp=xp)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm, MaxScaledLayerNorm])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_largest_numbers_of_half_precision_do_not_overflow(kind, dtype):
    torch = library_or_skip("torch")
    largest = torch.finfo(getattr(torch, dtype)).max
    rows = np.asarray([[1.0, -1.0, 0.5, -0.25], [1.0, 1.0, 1.0, -1.0], [0.5, 0.25, 0.0, 1.0]])
    layer = kind(4, init=Initializer(torch, dtype="float32"))
    exact = to_host(layer(from_host(torch, rows.astype("float32") * 1e4)))  # far from epsilon as well
    half = replace(layer.to(torch, dtype=dtype), dict(layer.to(torch, dtype=dtype).named_parameters()))
    large = half(torch.asarray(rows * largest, dtype=getattr(torch, dtype)))
    assert dtype_name(large.dtype) == dtype
    np.testing.assert_allclose(to_host(large), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_half_precision_gradients_are_those_of_float32(kind):
    torch = library_or_skip("torch")
    x, g = normal(0, 3, 8) * 20.0, normal(1, 3, 8)
    actual = {}
    for dtype in ("float32", "bfloat16"):
        layer = kind(8, init=Initializer(torch, dtype=dtype))
        inputs = (layer, torch.asarray(x, dtype=getattr(torch, dtype)))
        g_array = torch.asarray(g, dtype=getattr(torch, dtype))
        _, (_, dx) = value_and_grad(lambda inputs, g=g_array: weighted_sum(inputs[0](inputs[1]), g))(inputs)
        actual[dtype] = to_host(dx).astype("float64")
    np.testing.assert_allclose(actual["bfloat16"], actual["float32"], atol=0.02 * np.abs(actual["float32"]).max())
