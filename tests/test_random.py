"""Random numbers: reproducible everywhere, independent along different paths."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.reference import for_each, raises_line
from xformer import Rng
from xformer.backends import array_namespace, dtype_name, to_host
from xformer.errors import ConfigError
from xformer.random import split_rng

SHOW = """
from xformer import Rng
from xformer.backends import resolve
rng = Rng(7).fold_in("dropout", 3)
keep, probability = rng.split(2)[1].bernoulli(0.7, (40,), resolve("numpy"))
print(rng.key, "".join(map(str, keep.astype(int))), probability, rng.permutation(5), rng.normal((1,)).tolist())
"""


def show(hash_seed):
    environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True, env=environment)
    return result.stdout


def test_every_process_draws_the_same():
    first = show("1")
    assert first == show("2")
    # Pinned, since runs are resumed by it: on another machine, and in another version.
    assert first.startswith("243338875908197200911390531153942793709 0111101110101111100111011001111111111110 0.69999")


def test_streams_differ_if_any_label_differs():
    rng = Rng(0)
    paths = [
        rng,
        *rng.split(3),
        rng.fold_in(),
        rng.fold_in("a"),
        rng.fold_in("b"),
        rng.fold_in("a", "b"),
        rng.fold_in("a").fold_in("b"),
        rng.fold_in("a/b"),
        rng.fold_in("a'", "'b"),
        rng.fold_in(1),
        rng.fold_in("1"),
        rng.fold_in(1, 2),
        rng.fold_in(12),
        rng.fold_in(0),
        rng.fold_in(-1),
        Rng(1),
        *Rng(1).split(3),
        rng.fold_in("é"),
    ]
    assert len({path.key for path in paths}) == len(paths)
    assert rng.fold_in(np.int64(1)) == rng.fold_in(1)


@for_each("label", [0.2, 1.0, True, None, np.float64(1.0), np.bool_(True), (1, 2), b"a"])
def test_labels_are_integers_and_strings(label):
    with raises_line(ConfigError, "a label is .*; expected an integer or a string"):
        Rng(0).fold_in("dropout", label)


def test_streams_are_uncorrelated():
    draws = np.stack([stream.normal((4000,)) for stream in (Rng(0), *Rng(0).split(3), Rng(1), Rng(0).fold_in("x"))])
    correlation = np.corrcoef(draws) - np.eye(len(draws))
    assert np.abs(correlation).max() < 0.08


def test_an_rng_is_a_value():
    rng = Rng(5)
    np.testing.assert_array_equal(rng.uniform((3,)), rng.uniform((3,)))
    assert rng.split(2) == rng.split(2)
    assert Rng(rng.key) == rng
    assert hash(Rng(5)) == hash(rng)
    with pytest.raises(AttributeError):
        rng.key = 6


@for_each("seed", [-1, 1.0, "7", True, None])
def test_a_seed_is_an_integer(seed):
    with raises_line(ConfigError, "seed is .*; expected a non-negative integer"):
        Rng(seed)


def test_host_draws_have_their_distributions():
    uniform, normal = Rng(0).uniform((20000,), -1.0, 3.0), Rng(0).normal((20000,), 2.0)
    assert uniform.min() >= -1.0
    assert uniform.max() < 3.0
    assert abs(uniform.mean() - 1.0) < 0.03
    assert abs(normal.mean()) < 0.05
    assert abs(normal.std() - 2.0) < 0.03


@for_each("probability", [0.1, 0.5, 0.9])
def test_bernoulli_draws_with_the_probability_it_says(xp, probability):
    mask, exact = Rng(0).bernoulli(probability, (3, 5001), xp)
    assert array_namespace(mask).name == xp.name
    assert dtype_name(mask.dtype) == "bool"
    assert tuple(mask.shape) == (3, 5001)
    assert abs(exact - probability) <= 2.0**-17
    deviation = (exact * (1.0 - exact) / (3 * 5001)) ** 0.5
    assert abs(to_host(mask).mean() - exact) < 4.0 * deviation
    np.testing.assert_array_equal(to_host(mask), to_host(Rng(0).bernoulli(probability, (3, 5001), xp)[0]))
    assert (to_host(mask) != to_host(Rng(1).bernoulli(probability, (3, 5001), xp)[0])).any()


def test_a_counter_selects_what_is_drawn(xp):
    rng, shape = Rng(7).fold_in("dropout"), (40, 5)
    masks = []
    for number in (0, 1, 1):
        counted = rng.with_counter(xp.asarray(number, dtype=xp.index_dtype)).split(2)[1]
        masks.append(to_host(counted.bernoulli(0.5, shape, xp)[0]))
    np.testing.assert_array_equal(masks[1], masks[2])
    assert (masks[0] != masks[1]).any()
    for number in (0, 3):  # a count is no seed
        counted = Rng(0).with_counter(xp.asarray(number, dtype=xp.index_dtype))
        assert (
            to_host(counted.bernoulli(0.5, shape, xp)[0]) != to_host(Rng(number).bernoulli(0.5, shape, xp)[0])
        ).any()


def test_bernoulli_at_the_ends(xp):
    for probability, expected in ((1.0, 1.0), (0.0, 0.0), (1e-9, 2.0**-16), (1.0 - 1e-9, 1.0)):
        mask, exact = Rng(0).bernoulli(probability, (1000,), xp)
        assert exact == expected
        assert to_host(mask).mean() == pytest.approx(expected, abs=0.01)


def test_keys_that_differ_only_in_high_bits_draw_differently(xp):
    """The libraries' own generators take fewer bits than a key has."""
    low, high = (to_host(Rng(key).bernoulli(0.5, (64,), xp)[0]) for key in (5, 5 + 2**40))
    assert (low != high).any()


def test_seeds_are_not_streams():
    assert split_rng(None, 2) == (None, None)
    assert split_rng(Rng(0), 2) == Rng(0).split(2)
    with raises_line(ConfigError, "rng is 0; expected an Rng"):
        split_rng(0, 2)
