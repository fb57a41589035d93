"""Dropout acts when an Rng is given, and is right on average."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_close
from tests.reference import normal, raises_line, weighted_sum
from xformer import Rng, value_and_grad
from xformer.backends import from_host, to_host
from xformer.errors import ConfigError
from xformer.layers import Dropout


def test_without_an_rng_dropout_is_the_identity(xp):
    x = from_host(xp, normal(0, 4))
    assert Dropout(0.5)(x, None) is x
    assert Dropout(0.0)(x, Rng(0)) is x


def test_the_same_rng_draws_the_same_mask(xp):
    x, layer = from_host(xp, normal(0, 8, 8)), Dropout(0.5)
    first = layer(x, Rng(0))
    assert_close(layer(x, Rng(0)), first, tolerance=0.0)
    assert (to_host(layer(x, Rng(1))) != to_host(first)).any()


@settings(max_examples=10, deadline=None)
@given(rate=st.floats(0.01, 0.95), seed=st.integers(0, 2**64))
def test_elements_are_zero_or_scaled_and_the_mean_stays(rate, seed):
    y = Dropout(rate)(np.ones(40000), Rng(seed))
    retained = y[y != 0.0]
    assert np.ptp(retained) == 0.0
    np.testing.assert_allclose(retained[0], 1.0 / (1.0 - rate), rtol=2e-3)
    # The share that is kept times the scale: 1, within five standard deviations.
    assert abs(y.mean() - 1.0) < 5.0 * (rate / (1.0 - rate) / y.size) ** 0.5 + 1e-9


def test_gradients_pass_through_kept_elements_only(xp):
    x, g, layer = from_host(xp, normal(0, 6, 6)), from_host(xp, normal(1, 6, 6)), Dropout(0.4)
    _, gradient = value_and_grad(lambda x: weighted_sum(layer(x, Rng(2)), g))(x)
    assert_close(gradient * x, layer(x, Rng(2)) * g)


def test_a_rate_close_to_one_keeps_a_few():
    assert np.isfinite(Dropout(0.9999999)(np.ones(100), Rng(0))).all()


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_rates_outside_zero_to_one_are_refused(rate):
    with raises_line(ConfigError, r"dropout is .*; expected a number in \[0, 1\)"):
        Dropout(rate)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_seed_is_no_source_of_masks(rate):
    with raises_line(ConfigError, r"rng is 3; expected an Rng, e.g. xformer.Rng\(0\), or None"):
        Dropout(rate)(np.ones(3), 3)
