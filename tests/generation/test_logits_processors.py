import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_close
from tests.generation.definitions import log_softmax
from tests.reference import normal, small_model
from xformer.backends import from_host, to_host
from xformer.generation.config import DecodingOptions
from xformer.generation.lengths import LengthRange
from xformer.generation.logits_processors import (
    favor,
    forbid,
    forbid_end,
    forbid_in_rows,
    force,
    log_sum_exp,
    penalize_repetition,
    process,
    repeating_tokens,
)
from xformer.generation.task import DecodingTask
from xformer.generation.topic import TopicFocus

INFINITY = math.inf
LOGITS = np.asarray([[1.0, -2.0, 0.5, 3.0], [0.0, 4.0, -1.0, 2.0]])


def test_forbidden_everywhere(xp):
    expected = [[1.0, -INFINITY, 0.5, -INFINITY], [0.0, -INFINITY, -1.0, -INFINITY]]
    found = to_host(forbid(from_host(xp, LOGITS), [1, 3]))
    np.testing.assert_array_equal(found, expected)


def test_forbidden_in_some_rows(xp):
    found = to_host(forbid_in_rows(from_host(xp, LOGITS), [{3, 0}, set()]))
    np.testing.assert_array_equal(found, [[-INFINITY, -2.0, 0.5, -INFINITY], LOGITS[1]])
    np.testing.assert_array_equal(to_host(forbid_end(from_host(xp, LOGITS), [False, True], 2)),
                                  [LOGITS[0], [0.0, 4.0, -INFINITY, 2.0]])  # fmt: skip


def test_repetition_penalty_is_the_formula(xp):
    found = penalize_repetition(from_host(xp, LOGITS), [[0, 1, 1], [3]], 2.0)
    assert_close(found, [[0.5, -4.0, 0.5, 3.0], [0.0, 4.0, -1.0, 1.0]], xp=xp)
    assert_close(penalize_repetition(from_host(xp, LOGITS), [[], []], 2.0), LOGITS, xp=xp)


def test_favoured_tokens(xp):
    found = favor(from_host(xp, LOGITS), [{1: 1.0, 3: 2.0}, {}], 1.5)
    assert_close(found, LOGITS + np.asarray([[0.0, 1.5, 0.0, 3.0], [0.0] * 4]), xp=xp)
    assert_close(favor(from_host(xp, LOGITS), [{}, {}], 1.5), LOGITS, xp=xp)


def test_a_forced_token_is_certain_whatever_was_forbidden(xp):
    forbidden = forbid(from_host(xp, LOGITS), [2])
    found = to_host(force(forbidden, [2, None]))
    np.testing.assert_array_equal(found, [[-INFINITY, -INFINITY, 0.0, -INFINITY], [0.0, 4.0, -INFINITY, 2.0]])


def test_log_sum_exp(xp):
    assert_close(log_sum_exp(from_host(xp, LOGITS)), (LOGITS - log_softmax(LOGITS))[:, :1], xp=xp)
    one = np.asarray([[0.0, -INFINITY]])
    assert_close(log_sum_exp(from_host(xp, one)), [[0.0]], xp=xp)


@pytest.mark.parametrize(
    ("history", "size", "expected"),
    [
        ([], 1, set()),
        ([4, 5, 4], 1, {4, 5}),
        ([], 2, set()),
        ([4], 2, set()),
        ([4, 5, 4], 2, {5}),
        ([4, 4], 2, {4}),
        ([4, 5, 6, 4, 5, 7, 4, 5], 3, {6, 7}),
        ([4, 5], 3, set()),
    ],
)
def test_tokens_that_would_repeat_an_ngram(history, size, expected):
    assert repeating_tokens(history, size) == expected


@settings(max_examples=50, deadline=None)
@given(history=st.lists(st.integers(0, 3), max_size=12), size=st.integers(1, 4))
def test_exactly_the_tokens_that_repeat_an_ngram(history, size):
    def ngrams(tokens):
        return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]

    seen = ngrams(history)
    expected = {token for token in range(4) if len(ngrams([*history, token])) > len(seen)
                and ngrams([*history, token])[-1] in seen}  # fmt: skip
    assert repeating_tokens(history, size) == expected


# --- All together -----------------------------------------------------------------------------------------------------


def task(vocabulary=6, *, ranges=((0, 9),), prefixes=((),), foci=None, **options):
    return DecodingTask(
        model=small_model(target_vocab_size=vocabulary),
        options=DecodingOptions(**options),
        begin=lambda: None,
        first=[1],
        prefixes=[list(prefix) for prefix in prefixes],
        ranges=[LengthRange(*limits) for limits in ranges],
        never=frozenset((0, 1)),
        eos_id=2,
        foci=foci,
    )


def allowed(logits):
    return [set(np.flatnonzero(row > -INFINITY)) for row in to_host(logits)]


def test_padding_and_start_are_forbidden():
    assert allowed(process(task(), normal(0, 1, 6), [[]], [0])) == [{2, 3, 4, 5}]


def test_rows_follow_the_settings_of_their_sentences():
    job = task(ranges=[(2, 9), (0, 9)], prefixes=[[], [4, 5]])
    logits = normal(0, 3, 6)
    assert allowed(process(job, logits, [[3], [3, 3], [4]], [0, 0, 1])) == [{3, 4, 5}, {2, 3, 4, 5}, {5}]


def test_scores_are_those_of_the_changed_distribution():
    job = task(repetition_penalty=1.5, foci=[TopicFocus.of([[[4]]], 6)], topic_strength=2.0)
    logits = normal(0, 1, 6)
    expected = logits.copy()
    expected[0, 3] *= 1.5 if logits[0, 3] < 0 else 1 / 1.5
    expected[0, 4] += 2.0
    expected[0, :2] = -INFINITY
    assert_close(process(job, logits, [[3]], [0])[:, 2:], expected[:, 2:])
    assert allowed(process(job, logits, [[3]], [0])) == [{2, 3, 4, 5}]


def test_ngram_blocks_give_way_before_nothing_is_left():
    job = task(ranges=[(9, 9)], no_repeat_ngram_size=1)
    assert allowed(process(job, normal(0, 1, 6), [[3, 4]], [0])) == [{5}]
    assert allowed(process(job, normal(0, 1, 6), [[3, 4, 5]], [0])) == [{3, 4, 5}]  # not the end: the minimum holds
    job = task(no_repeat_ngram_size=1)
    assert allowed(process(job, normal(0, 1, 6), [[3, 4, 5]], [0])) == [{2}]


def test_a_minimum_gives_way_where_only_the_end_is_left():
    assert allowed(process(task(3, ranges=[(4, 9)]), normal(0, 1, 3), [[]], [0])) == [{2}]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_half_precision_is_widened(dtype):
    assert process(task(), normal(0, 1, 6).astype(dtype), [[]], [0]).dtype == np.float32
