import math

import numpy as np

from tests.generation.definitions import log_softmax
from tests.reference import normal
from xformer.backends import from_host
from xformer.generation.candidates import Candidate, continuations, ranked

LOGITS = normal(0, 3, 7)


def test_continuations_are_the_best_tokens_of_each_row(xp):
    found = continuations(from_host(xp, LOGITS), 3, 2)
    expected = log_softmax(LOGITS)
    order = np.argsort(-expected, axis=-1)[:, :3]
    np.testing.assert_array_equal(found.tokens, order)
    np.testing.assert_allclose(found.gains, np.take_along_axis(expected, order, axis=-1), atol=1e-12)
    np.testing.assert_allclose(found.ends, expected[:, 2], atol=1e-12)
    assert isinstance(found.gains, np.ndarray)
    assert found.gains.dtype == found.ends.dtype == np.float64


def test_nothing_may_end_and_fewer_tokens_than_asked_for():
    found = continuations(LOGITS, 100, None)
    assert found.ends is None
    assert found.tokens.shape == (3, 7)


def test_candidates_are_ranked_within_groups_of_any_size():
    found = continuations(LOGITS, 7, None)
    totals = log_softmax(LOGITS)
    first, second = ranked(found, [[-1.0, -0.5], [0.0]], [[2, 0], [1]], 5)
    every = sorted(
        [Candidate(-1.0 + totals[2, token], 0, token) for token in range(7)]
        + [Candidate(-0.5 + totals[0, token], 1, token) for token in range(7)],
        reverse=True,
    )
    assert [(c.place, c.token) for c in first] == [(c.place, c.token) for c in every[:5]]
    np.testing.assert_allclose([c.log_probability for c in first], [c.log_probability for c in every[:5]])
    assert [(c.place, c.token) for c in second] == [(0, token) for token in np.argsort(-totals[1])[:5]]


def test_what_is_forbidden_is_no_candidate():
    logits = np.asarray([[0.0, -math.inf, -math.inf, 1.0]])
    ((best, other),) = ranked(continuations(logits, 4, 1), [[0.0]], [[0]], 4)
    assert (best.token, other.token) == (3, 0)
    assert continuations(logits, 4, 1).ends == -math.inf


def test_of_equal_candidates_earlier_hypotheses_come_first():
    found = continuations(np.zeros((2, 3)), 3, None)
    (candidates,) = ranked(found, [[0.0, 0.0]], [[0, 1]], 4)
    assert [(c.place, c.token) for c in candidates] == [(0, 0), (0, 1), (0, 2), (1, 0)]
