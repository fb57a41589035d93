"""Softmax: equal to torch's, with a temperature or without."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import normal, raises_line, weighted_sum, without_jax
from xformer import value_and_grad
from xformer.backends import from_host
from xformer.errors import ConfigError
from xformer.ops import softmax

SCORES = 3.0 * normal(0, 2, 4, 7)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_probabilities_and_gradients_equal_those_of_torch(temperature):
    torch = pytest.importorskip("torch", reason="torch is what it is compared with")
    weights = normal(1, 2, 4, 7)
    scores = torch.tensor(SCORES, requires_grad=True)
    expected = torch.softmax(scores / temperature, dim=-1)
    loss = (expected * torch.tensor(weights)).sum()
    loss.backward()
    assert_close(softmax(SCORES, temperature=temperature), expected.detach().numpy())
    actual = value_and_grad(lambda x: weighted_sum(softmax(x, temperature=temperature), weights))(SCORES)
    assert_close(actual[0], loss.item(), xp=np)
    assert_close(actual[1], scores.grad.numpy())


@without_jax
def test_the_temperature_divides_the_scores(xp):
    scores = from_host(xp, SCORES)
    for temperature in (0.5, 2.5):
        assert_close(softmax(scores, temperature=temperature), softmax(SCORES / temperature), xp=xp)


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_temperatures_that_are_not_positive_are_refused(temperature):
    with raises_line(ConfigError, rf"temperature is {temperature}; expected more than 0"):
        softmax(SCORES, temperature=temperature)
