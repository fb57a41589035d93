import math

import numpy as np

from tests.generation.definitions import log_softmax
from tests.reference import normal
from xformer.backends import from_host
from xformer.generation.beams import Beam, rank_candidates
from xformer.generation.processors import top_tokens

LOG_PROBS = log_softmax(normal(0, 3, 7))


def test_top_tokens_are_the_best_of_each_row(xp):
    top = top_tokens(from_host(xp, LOG_PROBS), 3, 2)
    expected = LOG_PROBS
    order = np.argsort(-expected, axis=-1)[:, :3]
    np.testing.assert_array_equal(top.tokens, order)
    np.testing.assert_allclose(top.log_probs, np.take_along_axis(expected, order, axis=-1), atol=1e-12)
    np.testing.assert_allclose(top.eos_log_probs, expected[:, 2], atol=1e-12)
    assert isinstance(top.log_probs, np.ndarray)
    assert top.log_probs.dtype == top.eos_log_probs.dtype == np.float64


def test_without_eos_and_with_a_small_vocabulary():
    top = top_tokens(LOG_PROBS, 100, None)
    assert top.eos_log_probs is None
    assert top.tokens.shape == (3, 7)


def test_candidates_are_ranked_within_groups_of_any_size():
    top = top_tokens(LOG_PROBS, 7, None)
    totals = LOG_PROBS
    first, second = rank_candidates(top, [[Beam(-1.0, 2), Beam(-0.5, 0)], [Beam(0.0, 1)]], 5)
    every = sorted(
        [(-1.0 + totals[2, token], 2, token) for token in range(7)]
        + [(-0.5 + totals[0, token], 0, token) for token in range(7)],
        reverse=True,
    )
    assert [(c.row, c.token) for c in first] == [(row, token) for _, row, token in every[:5]]
    np.testing.assert_allclose([c.log_probability for c in first], [total for total, _, _ in every[:5]])
    assert [(c.row, c.token) for c in second] == [(1, token) for token in np.argsort(-totals[1])[:5]]


def test_masked_tokens_are_no_candidates():
    logits = np.asarray([[0.0, -math.inf, -math.inf, 1.0]])
    ((best, other),) = rank_candidates(top_tokens(logits, 4, 1), [[Beam(0.0, 0)]], 4)
    assert (best.token, other.token) == (3, 0)
    assert top_tokens(logits, 4, 1).eos_log_probs == -math.inf


def test_ties_are_ordered_by_beam():
    top = top_tokens(np.zeros((2, 3)), 3, None)
    (candidates,) = rank_candidates(top, [[Beam(0.0, 0), Beam(0.0, 1)]], 4)
    assert [(c.row, c.token) for c in candidates] == [(0, 0), (0, 1), (0, 2), (1, 0)]
