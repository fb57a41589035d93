"""The two maps of gated units as one product on CuPy: the values and derivatives of two, in fewer calls of cuBLAS."""

from __future__ import annotations

import pytest

import xformer as xf
from tests.conftest import assert_close
from tests.ops._cupy.cuda_cases import normal
from tests.ops._cupy.fake_cublas import HANDLE, Binding
from tests.ops.replace_kernels import replace_kernels
from tests.reference import for_each
from xformer import layers
from xformer.backends import array_namespace, resolve
from xformer.backends.cupy import CupyLibrary
from xformer.kernels.cupy import cublas
from xformer.tree import flatten, replace

LAYERS = [
    lambda bias: layers.GatedFeedForward(8, 24, bias=bias, init=3),
    lambda bias: layers.GatedFeedForward(8, 24, bias=bias, activation="gelu", init=4),
    lambda bias: layers.ClampedFeedForward(8, 24, bias=bias, init=5),
]


@pytest.fixture
def joined(cuda_host, monkeypatch):
    """Join maps of NumPy arrays as those of CuPy; return the calls of cuBLAS."""
    binding = Binding()
    monkeypatch.setattr(type(resolve("numpy").library), "joins_maps", lambda library: True)
    monkeypatch.setattr(cublas, "binding_and_handle", lambda: (binding, HANDLE))
    return binding.calls


def hidden_and_gradients(layer, *inputs):
    def loss(layer, *inputs):
        hidden = [layer.hidden(x) for x in inputs]
        return sum(array_namespace(each).sum(each * each) for each in hidden)

    value, gradients = xf.value_and_grad(loss, argnums=(0, *range(1, len(inputs) + 1)))(layer, *inputs)
    return [value, *(layer.hidden(x) for x in inputs), *flatten(gradients)[0]]


@for_each("bias", [False, True])
@for_each("make", LAYERS)
def test_values_and_derivatives(joined, monkeypatch, make, bias):
    layer = make(bias)
    inputs = [normal(*shape).astype("float32") for shape in ((2, 5, 8), (7, 8), (8,), (0, 8))]
    got = hidden_and_gradients(layer, *inputs)
    monkeypatch.undo()
    replace_kernels(monkeypatch, "numpy", {})
    for actual, expected in zip(got, hidden_and_gradients(layer, *inputs), strict=True):
        assert_close(actual, expected, tolerance=1e-4)


def test_two_products_of_one_input_are_one_call(joined):
    layer, x = LAYERS[0](False), normal(2, 5, 8).astype("float32")
    layer.hidden(x)
    assert [call["batchCount"] for call in joined] == [2]
    joined.clear()
    xf.value_and_grad(lambda layer, x: array_namespace(x).sum(layer.hidden(x)), argnums=(0, 1))(layer, x)
    assert [call["batchCount"] for call in joined] == [2, 1, 1, 2]  # forward, both for the input, the weights


def test_a_call_is_repeated_only_with_weights_as_far_apart(joined):
    """The distance of two weights is an argument of the product."""
    x, memory = normal(4, 8).astype("float32"), normal(3, 8, 24).astype("float32")
    for first, second in ((0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)):
        layer = LAYERS[0](False)
        layer = replace(layer, dict(layer.named_arrays()) | {"gate.weight": memory[first], "up.weight": memory[second]})
        gate, up = layer._gate_and_up(x)
        assert_close(gate, x @ memory[first], tolerance=1e-5)
        assert_close(up, x @ memory[second], tolerance=1e-5)


def test_in_reproducible_mode_two_products_keep_their_bits(reproducible):
    """The cotangent of the input is the sum of two, each rounded."""
    assert not CupyLibrary.joins_maps(None)
