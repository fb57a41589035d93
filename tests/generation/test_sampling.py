import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation.definitions import log_softmax
from tests.reference import for_each, normal
from xformer.backends import from_host, to_host
from xformer.generation.batch import SampleRequest, sampling_settings, uniform_streams
from xformer.generation.config import GenerationConfig
from xformer.generation.processors import normalize, token_alternatives
from xformer.generation.sampling import choose
from xformer.ops import decoding
from xformer.ops.decoding import draw, keep_min_p, keep_top_k, keep_top_p
from xformer.random import Rng

PROBABILITIES = np.asarray([0.05, 0.4, 0.0, 0.25, 0.2, 0.1])
with np.errstate(divide="ignore"):
    LOGITS = np.log(PROBABILITIES)[None, :] + 3.0


def support(logits):
    return [np.flatnonzero(row > -math.inf).tolist() for row in to_host(logits)]


def truncate(logits, options):
    return decoding.truncate(logits, **sampling_settings(options))


@for_each("k, kept", [(1, [1]), (2, [1, 3]), (4, [1, 3, 4, 5]), (100, [0, 1, 3, 4, 5])])
def test_top_k(xp, k, kept):
    assert support(keep_top_k(from_host(xp, LOGITS), k)) == [kept]


@for_each(
    "p, kept",
    [(0.0, [1]), (0.01, [1]), (0.39, [1]), (0.41, [1, 3]), (0.7, [1, 3, 4]), (0.94, [1, 3, 4, 5]), (1.0, None)],
)
def test_top_p(xp, p, kept):
    assert support(keep_top_p(from_host(xp, LOGITS), p)) == [kept or [0, 1, 3, 4, 5]]


@for_each("p, kept", [(1.0, [1]), (0.6, [1, 3]), (0.4, [1, 3, 4]), (0.2, [1, 3, 4, 5]), (0.01, [0, 1, 3, 4, 5])])
def test_min_p(xp, p, kept):
    assert support(keep_min_p(from_host(xp, LOGITS), p)) == [kept]


def test_truncation_uses_the_distribution_after_temperature():
    """At temperature 2 probabilities are as their roots, .63 : .5 : .45 : .32 : .22."""
    options = GenerationConfig(temperature=2.0, top_k=4, top_p=0.7)
    assert support(truncate(LOGITS, options)) == [[1, 3, 4]]  # .33 + .26 of the four that top_k leaves is below .7
    np.testing.assert_allclose(truncate(LOGITS, GenerationConfig(temperature=2.0)), LOGITS / 2.0)
    assert support(truncate(LOGITS, GenerationConfig(min_p=0.6))) == [[1, 3]]


def test_top_p_of_one_is_off_and_of_zero_keeps_one_token_as_in_transformers():
    logits = np.asarray([[20.0, 3.0, 1.0, 0.0, -4.0]], np.float32)  # the others have less than 1e-7 of the probability
    assert support(truncate(logits, GenerationConfig(temperature=1.0, top_p=1.0))) == [[0, 1, 2, 3, 4]]
    warpers = pytest.importorskip("transformers").generation.logits_process
    torch = pytest.importorskip("torch")
    for p in (0.0, 1e-9, 0.5, 1.0 - 1e-6):
        expected = warpers.TopPLogitsWarper(p)(None, torch.asarray(logits))
        assert support(keep_top_p(logits, p)) == support(expected.numpy()), p


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1000), p=st.floats(0.01, 1.0))
def test_top_p_is_the_smallest_set_with_that_much(seed, p):
    logits = normal(seed, 1, 9)
    probabilities = np.exp(log_softmax(logits))[0]
    kept = support(keep_top_p(logits, p))[0]
    assert probabilities[kept].sum() >= p - 1e-12
    assert sorted(kept) == sorted(np.argsort(-probabilities)[: len(kept)])
    assert sum(sorted(probabilities[kept])[1:]) < p


def test_draws_invert_the_cumulative_distribution(xp):
    """The cumulative sums are .05, .45, .45, .70, .90, 1."""
    shares = [0.0, 0.0499, 0.0501, 0.4499, 0.4501, 0.6999, 0.7001, 0.8999, 0.9001, 1.0 - 2**-53]
    logits = from_host(xp, np.repeat(LOGITS, len(shares), axis=0))
    assert to_host(draw(logits, from_host(xp, shares, dtype=logits.dtype))).tolist() == [0, 0, 1, 1, 3, 3, 4, 4, 5, 5]


@for_each("dtype", ["float32", "float64"])
def test_tokens_without_probability_are_never_drawn(xp, dtype):
    logits = np.full((2, 7), -math.inf)
    logits[:, [2, 4]] = [[1.0, 0.0], [-50.0, 50.0]]
    shares = [0.0, 1.0 - 2**-53]
    logits, shares = (from_host(xp, x, dtype=dtype) for x in (logits, shares))
    assert to_host(draw(logits, shares)).tolist() == [2, 4]
    assert to_host(draw(logits, xp.flip(shares))).tolist()[0] == 4


@for_each("settings", [{"temperature": 0.7}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.3}])
def test_draws_follow_the_distribution(settings):
    """Chi-square over 4000 draws; 25 is beyond the 99.99th percentile for up to 5 degrees of freedom."""
    logits = truncate(np.repeat(LOGITS, 4000, axis=0), GenerationConfig(**settings))
    expected = np.exp(log_softmax(logits[:1]))[0] * 4000
    drawn = draw(logits, Rng(3).uniform((4000,)))
    counts = np.bincount(drawn, minlength=6)
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_square < 25.0


def test_streams_belong_to_a_sentence_a_sample_and_a_position():
    single = uniform_streams(Rng(1), [4, 9], 1, [5, 5])
    several = uniform_streams(Rng(1), [9, 3, 4], 2, [7, 5, 5])
    assert several[2][0] == single[0][0]
    assert several[0][0][:5] == single[1][0]
    assert several[0][0] != several[0][1]
    assert uniform_streams(Rng(2), [4], 1, [5]) != single[:1]


@pytest.mark.parametrize("mode", ["auto", "portable"])
def test_an_offset_of_all_logits_changes_no_log_probability(xp, monkeypatch, mode):
    monkeypatch.setenv("XFORMER_KERNELS", mode)
    logits = np.round(8.0 * normal(0, 2, 50)) / 8.0  # exact in float32 with the offset, too
    expected = log_softmax(logits)
    shifted = from_host(xp, (logits + 1e6).astype(np.float32))
    for uniforms in (None, [0.2, 0.9]):
        config = GenerationConfig(temperature=2.0 if uniforms else None)
        tokens, log_probs = choose([SampleRequest(shifted, sampling_settings(config), uniforms)])
        np.testing.assert_allclose(log_probs[:, 0], expected[[0, 1], tokens[:, 0]], rtol=1e-6)
    np.testing.assert_allclose(to_host(normalize(shifted, None)), expected, rtol=1e-6)
    for row, record in enumerate(token_alternatives(shifted, [7, 3], 2)):
        np.testing.assert_allclose(record.log_probability, expected[row, [7, 3][row]], rtol=1e-6)
        np.testing.assert_allclose(
            [score for _, score in record.alternatives], np.sort(expected[row])[:-3:-1], rtol=1e-6
        )
