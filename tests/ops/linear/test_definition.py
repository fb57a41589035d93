"""The linear map with an activation function equals one after the other, however it is computed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from xformer import grad, value_and_grad
from xformer.backends import array_namespace
from xformer.errors import ConfigError
from xformer.ops import activation, linear


def arrays(xp):
    draw = np.random.default_rng(0).normal
    return [xp.asarray(draw(size=shape)) for shape in [(2, 3, 4), (4, 5), (5,)]]


@pytest.mark.parametrize("name", ["relu", "gelu", "silu"])
def test_activations(xp, name):
    x, weight, bias = arrays(xp)
    assert_close(linear(x, weight, bias, activation=name), activation(name)(linear(x, weight, bias)))


def test_the_fused_operation_has_the_same_derivatives(xp):
    def of_sum(function):
        def loss(x, weight, bias):
            y = function(x, weight, bias)
            return array_namespace(y).sum(y * y * y)

        return loss

    def curvature(function):
        return grad(lambda *inputs: array_namespace(*inputs).sum(grad(of_sum(function))(*inputs) ** 2))

    def fused(*inputs):
        return linear(*inputs, activation="relu")

    def one_after_the_other(*inputs):
        return activation("relu")(linear(*inputs))

    actual, expected = (value_and_grad(of_sum(each))(*arrays(xp)) for each in (fused, one_after_the_other))
    assert_close(actual[0], expected[0])
    assert_close(actual[1], expected[1])
    assert_close(curvature(fused)(*arrays(xp)), curvature(one_after_the_other)(*arrays(xp)))


def test_an_unknown_activation_is_refused(xp):
    with pytest.raises(ConfigError, match="activation is 'rleu'; expected one of relu"):
        linear(*arrays(xp), activation="rleu")
