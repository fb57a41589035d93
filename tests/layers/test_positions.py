"""Positional encodings: formulas, figures of the papers, and invariance of relative ones to shifts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.conftest import assert_close
from tests.reference import for_each, normal, raises_line
from xformer import Initializer
from xformer.errors import ConfigError, ShapeError
from xformer.layers import ALiBi, LearnedPositions, RelativeBias, Rotary, Sinusoidal, remaining_length, sinusoidal


@for_each("d_model", [1, 7, 8])
def test_every_entry_follows_the_formula(d_model):
    table = sinusoidal(70, d_model, start=60, xp=np, dtype=np.float64)
    assert table.shape == (70, d_model)
    for row in (0, 3, 4, 69):
        for feature in range(d_model):
            angle = (60 + row) / 10000.0 ** (2 * (feature // 2) / d_model)
            assert table[row, feature] == pytest.approx((math.sin, math.cos)[feature % 2](angle), abs=1e-12)


@for_each("dtype", ["float32", "float64"])
def test_values_and_dtype_in_every_library(xp, dtype):
    angle = np.arange(2, 7)[:, None] / 10000.0 ** (np.arange(0, 6, 2) / 6)
    expected = np.stack([np.sin(angle), np.cos(angle)], axis=-1).reshape(5, 6).astype(dtype)  # rounded once
    assert_close(sinusoidal(5, 6, start=2, xp=xp, dtype=getattr(xp, dtype)), expected, xp=xp, tolerance=0.0)


def test_the_cached_table_is_read_only():
    table = sinusoidal(4, 6, xp=np, dtype=np.float64)
    expected = table.copy()
    with pytest.raises(ValueError, match="read-only"):
        table += 1.0
    assert_close(sinusoidal(4, 6, xp=np, dtype=np.float64), expected, tolerance=0.0)


def test_positions_can_be_given_per_token(xp):
    x = xp.zeros((2, 3, 6), dtype=xp.float64)
    positions = xp.asarray([[0, 0, 1], [0, 1, 2]])
    table = sinusoidal(3, 6, xp=xp, dtype=xp.float64)
    actual = Sinusoidal(6)(x, positions)
    assert_close(actual[1, ...], table)
    assert_close(actual[0, 1, :], table[0, :])
    assert_close(actual[0, 2, :], table[1, :])
    assert_close(Sinusoidal(6)(x, start=2)[0, ...], sinusoidal(3, 6, start=2, xp=xp, dtype=xp.float64))


def test_learned_positions_are_rows_of_their_table(xp):
    layer = LearnedPositions(5, 4, init=Initializer(xp, dtype="float64"))
    x = xp.zeros((2, 3, 4), dtype=xp.float64)
    assert_close(layer(x, start=2)[1, ...], layer.weight[2:5, :])
    assert_close(
        layer(x, xp.asarray([[0, 0, 1], [0, 1, 2]]))[0, ...], xp.stack([layer.weight[i, :] for i in (0, 0, 1)])
    )
    with raises_line(ShapeError, "a sentence has 6 tokens; this model has learned positions for 5"):
        layer(x, start=3)


def test_rotary_scores_depend_on_the_distance_alone():
    rotary = Rotary(6)
    query, key = normal(0, 1, 1, 1, 6), normal(1, 1, 1, 1, 6)

    def score(at, other):
        turned = (rotary.rotation(1, start=p, like=query)(x) for p, x in ((at, query), (other, key)))
        return float(np.sum(np.prod(list(turned), axis=0)))

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-12)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3
    assert_close(rotary.rotation(1, like=query)(query), query)


def test_rotary_follows_the_formula(xp):
    x = np.asarray(normal(0, 1, 2, 5, 4))
    actual = Rotary(4, base=100.0).rotation(5, start=3, like=xp.asarray(x))(xp.asarray(x))
    expected = np.empty_like(x)
    for index in range(5):
        for pair in range(2):
            turn = np.exp(1j * (3 + index) * 100.0 ** (-2 * pair / 4))
            number = (x[..., index, pair] + 1j * x[..., index, pair + 2]) * turn
            expected[..., index, pair], expected[..., index, pair + 2] = number.real, number.imag
    assert_close(actual, expected, xp=xp, tolerance=1e-14)


def test_rotary_expects_an_even_head_dim():
    with raises_line(ConfigError, "head_dim is 5; expected an even number of at most head_dim, 5"):
        Rotary(5)
    for features in (3, 10):
        with raises_line(ConfigError, f"features is {features}; expected an even number of at most head_dim, 8"):
            Rotary(8, features=features)


@for_each(
    "base, scaling, message",
    [
        (1e4, {"rope_type": "linear", "factor": -2.0}, "rope_scaling has factor -2.0; expected numbers above 0"),
        (1e4, {"rope_type": "longrope", "short_factor": [1.0, math.nan]}, "rope_scaling has short_factor"),
        (
            1e4,
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "rope_scaling has low_freq_factor 4.0 and high_freq_factor 4.0; expected low < high",
        ),
        (
            1.0,
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8},
            "rotary positions of base 1.0 and scaling .* have infinite wavelengths",
        ),
    ],
)
def test_rotary_positions_of_invalid_wavelengths_are_refused(base, scaling, message):
    with raises_line(ConfigError, message):
        Rotary(4, base=base, scaling=scaling)


def test_alibi_has_the_slopes_of_the_paper():
    assert ALiBi(8).slopes == [2.0**-i for i in range(1, 9)]
    assert ALiBi(2).slopes == [2.0**-4, 2.0**-8]
    # Twelve heads: the slopes of eight, and every second one of sixteen.
    assert ALiBi(12).slopes == pytest.approx([2.0**-i for i in range(1, 9)] + [2.0 ** -(i / 2) for i in (1, 3, 5, 7)])


def test_a_scale_multiplies_the_slopes_of_alibi():
    assert ALiBi(2, scale=0.5).slopes == [2.0**-5, 2.0**-9]


def test_alibi_grows_with_the_distance(xp):
    bias = ALiBi(2).terms(2, 4, xp.zeros((1,), dtype=xp.float32)).bias
    distance = np.asarray([[2, 1, 0, 1], [3, 2, 1, 0]])
    expected = -np.asarray([2.0**-4, 2.0**-8])[:, None, None] * distance
    assert_close(bias, expected.astype("float32"), xp=xp)


@for_each("bidirectional", [True, False])
def test_relative_buckets_are_those_of_t5(bidirectional):
    """Compute T5's definition for each distance."""
    layer = RelativeBias(2, bidirectional=bidirectional, init=Initializer("numpy", dtype="float64"))
    bias = layer.terms(300, 300, layer.weight).bias
    for query in (0, 150, 299):
        for key in range(300):
            distance, buckets, first = key - query, 32, 0
            if bidirectional:
                buckets, first = 16, 16 * (distance > 0)
                distance = abs(distance)
            else:
                distance = max(-distance, 0)
            exact = buckets // 2
            if distance < exact:
                bucket = distance
            else:
                far = math.log(distance / exact) / math.log(128 / exact) * (buckets - exact)
                bucket = min(exact + int(far + 1e-9), buckets - 1)
            np.testing.assert_array_equal(bias[:, query, key], layer.weight[first + bucket])


def test_remaining_length_counts_down(xp):
    table = sinusoidal(10, 6, xp=xp, dtype=xp.float64)
    remaining = [[6, 5, 4], [3, 2, 1]]
    actual = remaining_length(xp.asarray(remaining), 6, xp.float64)
    for row in range(2):
        for index in range(3):
            assert_close(actual[row, index, :], table[remaining[row][index], :], tolerance=1e-12)
    assert tuple(remaining_length(xp.asarray([[1, 0]]), 5, xp.float64).shape) == (1, 2, 5)
