"""The feed-forward layer and its activations."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import for_each, normal, raises_line
from xformer import Initializer
from xformer.backends import from_host
from xformer.errors import ConfigError
from xformer.layers import ClampedFeedForward, FeedForward, GatedFeedForward
from xformer.ops import activation


@for_each("name", ["relu", "gelu", "gelu_tanh", "silu", "relu_squared", "quick_gelu"])
def test_activations_equal_those_of_torch(xp, name):
    torch = pytest.importorskip("torch", reason="torch is what they are compared with")
    functional = torch.nn.functional
    theirs = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "relu_squared": lambda x: functional.relu(x) ** 2,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    }[name]
    x = np.linspace(-7.0, 7.0, 301)
    assert_close(activation(name)(from_host(xp, x)), theirs(torch.tensor(x)).numpy(), xp=xp, tolerance=1e-14)


def test_an_unknown_activation_is_refused_by_the_constructor():
    with raises_line(ConfigError, "activation is 'swish'; expected one of relu, gelu, gelu_tanh"):
        FeedForward(4, 8, activation="swish", init=Initializer("numpy"))


@for_each("name", ["silu", "gelu"])
def test_gated_feed_forward_follows_its_formula(name):
    layer = GatedFeedForward(4, 8, activation=name, init=Initializer("numpy", dtype="float64"))
    x = normal(0, 2, 3, 4)
    gate, up = x @ layer.gate.weight, x @ layer.up.weight
    assert_close(layer(x), (activation(name)(gate) * up) @ layer.down.weight)


def test_a_clamped_feed_forward_refuses_other_activations():
    with raises_line(ConfigError, "activation is 'relu'; ClampedFeedForward expects 'silu'"):
        ClampedFeedForward(4, 8, activation="relu", init=0)


def test_clamped_feed_forward_follows_its_formula(xp):
    layer = ClampedFeedForward(4, 8, init=Initializer("numpy", dtype="float64"))
    x = 10.0 * normal(0, 2, 3, 4)
    gate, up = np.minimum(x @ layer.gate.weight, 7.0), np.clip(x @ layer.up.weight, -7.0, 7.0)
    assert np.max(gate) == np.max(up) == 7.0
    expected = (gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)) @ layer.down.weight
    assert_close(layer.to(xp)(from_host(xp, x)), expected, xp=xp)
