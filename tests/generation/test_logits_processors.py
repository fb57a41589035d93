import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import assert_close
from tests.generation.definitions import log_softmax
from tests.reference import normal
from xformer.backends import from_host, to_host
from xformer.generation.config import GenerationConfig
from xformer.generation.lengths import LengthLimits, LengthRange
from xformer.generation.logits_processors import (
    Histories,
    MinLength,
    NoRepeatNGram,
    RepetitionPenalty,
    SequenceBias,
    SuppressTokens,
    build_logits_processors,
    log_sum_exp,
    mask_tokens,
    repeating_tokens,
)

INFINITY = math.inf
LOGITS = np.asarray([[1.0, -2.0, 0.5, 3.0], [0.0, 4.0, -1.0, 2.0]])


def rows(*histories, indices=None):
    return Histories(map(list, histories), indices or range(len(histories)))


def test_tokens_are_masked_in_all_rows_or_in_some(xp):
    expected = [[1.0, -INFINITY, 0.5, -INFINITY], [0.0, -INFINITY, -1.0, -INFINITY]]
    suppress = SuppressTokens([1, 3])
    for _ in range(2):  # the second step reuses the mask
        np.testing.assert_array_equal(to_host(suppress(rows([], []), from_host(xp, LOGITS))), expected)
    masked = to_host(mask_tokens(from_host(xp, LOGITS), [{3, 0}, set()]))
    np.testing.assert_array_equal(masked, [[-INFINITY, -2.0, 0.5, -INFINITY], LOGITS[1]])
    logits = from_host(xp, LOGITS)
    assert mask_tokens(logits, [[], []]) is logits


def test_eos_is_masked_below_the_minimum_length(xp):
    lengths = LengthLimits([LengthRange(0, 9), LengthRange(2, 9)])
    masked = to_host(MinLength(lengths, [2])(rows([4], [4]), from_host(xp, LOGITS)))
    np.testing.assert_array_equal(masked, [LOGITS[0], [0.0, 4.0, -INFINITY, 2.0]])


def test_repetition_penalty_is_the_formula(xp):
    penalize = RepetitionPenalty(2.0)
    found = penalize(rows([0, 1, 1], [3]), from_host(xp, LOGITS))
    assert_close(found, [[0.5, -4.0, 0.5, 3.0], [0.0, 4.0, -1.0, 1.0]], xp=xp)
    assert_close(penalize(rows([], []), from_host(xp, LOGITS)), LOGITS, xp=xp)
    start = RepetitionPenalty(2.0, [3])
    assert_close(start(rows([], [2]), from_host(xp, LOGITS)), [[1.0, -2.0, 0.5, 1.5], [0.0, 4.0, -2.0, 1.0]], xp=xp)


def test_sequence_bias_belongs_to_the_input_of_a_row(xp):
    bias = SequenceBias([[], [[(1, 3)]]], 1.5)
    found = bias(rows([1], [0], indices=[1, 0]), from_host(xp, LOGITS))
    assert_close(found, LOGITS + np.asarray([[0.0, 1.5, 0.0, 3.0], [0.0] * 4]), xp=xp)
    assert_close(bias(rows([], [], indices=[0, 0]), from_host(xp, LOGITS)), LOGITS, xp=xp)


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


def process(
    logits, histories, indices=None, *, ranges=((0, 9),), prefixes=((),), sequence_bias=None, user=(), **config
):
    """Apply the processors of a batch in which 0 and 1 are suppressed and 2 is eos."""
    processors = build_logits_processors(
        GenerationConfig(**config),
        vocab_size=logits.shape[-1],
        eos_id=2,
        end_ids=frozenset({2, *config.get("stop_token_ids", ())}),
        suppressed=frozenset((0, 1)),
        start=[1],
        lengths=LengthLimits([LengthRange(*limits) for limits in ranges]),
        prefixes=prefixes,
        sequence_bias=sequence_bias,
        user_processors=user,
    )
    for processor in processors:
        logits = processor(Histories(histories, indices or [0] * len(histories)), logits)
    return logits


def allowed(logits):
    return [set(np.flatnonzero(row > -INFINITY)) for row in to_host(logits)]


def test_padding_and_start_are_masked():
    assert allowed(process(normal(0, 1, 6), [[]])) == [{2, 3, 4, 5}]


def test_rows_follow_the_settings_of_their_inputs():
    logits = normal(0, 3, 6)
    found = process(logits, [[3], [3, 3], [4]], [0, 0, 1], ranges=[(2, 9), (0, 9)])
    assert allowed(found) == [{3, 4, 5}, {2, 3, 4, 5}, {2, 3, 4, 5}]


@pytest.mark.parametrize("num_beams", [1, 2])
def test_processors_apply_in_order(num_beams):
    """In beam search to log-probabilities of the distribution with the favored phrases and without bos and pad."""
    logits = normal(0, 1, 6)
    expected = logits.copy()
    expected[0, 4] += 2.0
    expected[0, :2] = -INFINITY
    expected = log_softmax(expected) if num_beams > 1 else expected
    expected[0, 3] *= 1.5 if expected[0, 3] < 0 else 1 / 1.5
    seen = []
    found = process(logits, [[3]], repetition_penalty=1.5, sequence_bias=[[[[4]]]], num_beams=num_beams,
                    user=[lambda histories, logits: seen.append(logits) or logits - 1.0])  # fmt: skip
    assert_close(found[:, 2:], expected[:, 2:] - 1.0)
    assert_close(seen[0][:, 2:], expected[:, 2:])
    assert allowed(found) == [{2, 3, 4, 5}]


def test_scores_of_beams_never_increase():
    logits = normal(0, 2, 6)
    found = process(
        logits, [[3], [4]], num_beams=2, user=[lambda histories, logits: logits + np.asarray([[9.0], [-9.0]])]
    )
    suppressed = np.where([True, True, *[False] * 4], -INFINITY, logits)
    log_probs = log_softmax(suppressed)
    np.testing.assert_allclose(found[0], log_probs[0] - log_probs[0].max())
    np.testing.assert_allclose(found[1], log_probs[1] - 9.0)


def test_the_end_token_of_a_beam_has_the_largest_log_probability_of_all_end_tokens():
    logits = np.asarray([[0.0, 0.0, 1.0, 3.0, 2.0, 0.5], [0.0, 0.0, 2.0, 1.0, 0.5, 3.0]])
    log_probs = log_softmax(np.where([True, True, *[False] * 4], -INFINITY, logits))
    settings = {"stop_token_ids": [3, 4], "num_beams": 2}
    found = process(logits, [[5], [5]], **settings)
    expected = [[log_probs[0, 3], -INFINITY, -INFINITY, log_probs[0, 5]],
                [log_probs[1, 2], -INFINITY, -INFINITY, log_probs[1, 5]]]  # fmt: skip
    assert_close(found[:, 2:], np.asarray(expected))
    # A masked end token does not count, and the minimum length is that of all of them.
    assert_close(process(logits, [[5], [5]], **settings, suppress_tokens=[3])[:, 2], log_probs[[0, 1], [4, 2]])
    assert allowed(process(logits, [[5], [5]], **settings, ranges=[(2, 9)])) == [{5}, {5}]
    # Without beams each of them ends an output.
    assert allowed(process(logits, [[5], [5]], stop_token_ids=[3, 4])) == [{2, 3, 4, 5}] * 2


def test_ngrams_may_repeat_if_no_other_token_is_left():
    logits = normal(0, 1, 6)
    settings = {"no_repeat_ngram_size": 1}
    assert allowed(process(logits, [[3, 4]], ranges=[(9, 9)], **settings)) == [{5}]
    # Not eos: the minimum length holds.
    assert allowed(process(logits, [[3, 4, 5]], ranges=[(9, 9)], **settings)) == [{3, 4, 5}]
    assert allowed(process(logits, [[3, 4, 5]], **settings)) == [{2}]
    assert allowed(NoRepeatNGram(1)(rows([0, 1], [0, 1, 2, 3]), LOGITS)) == [{2, 3}, {0, 1, 2, 3}]


def test_eos_is_allowed_below_the_minimum_if_no_other_token_is():
    assert allowed(process(normal(0, 1, 3), [[]], ranges=[(4, 9)])) == [{2}]
