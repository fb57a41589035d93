import dataclasses
import json
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import assert_close
from tests.generation.definitions import log_softmax
from tests.reference import for_each, normal, raises_line, small_language_model
from xformer.backends import from_host, to_host
from xformer.errors import ConfigError, DataError
from xformer.generation import Rows, StopSequences, generate
from xformer.generation.batch import build_logits_processors
from xformer.generation.config import GenerationConfig, LengthLimits, LengthRange
from xformer.generation.processors import (
    LogitBias,
    SuppressTokens,
    below_minimum,
    favor_phrases,
    mask_repeated,
    penalize_frequency,
    penalize_repetition,
    processor_of,
    token_alternatives,
)
from xformer.random import Rng

INFINITY = math.inf
LOGITS = np.asarray([[1.0, -2.0, 0.5, 3.0], [0.0, 4.0, -1.0, 2.0]])


def apply(processor, histories, logits, indices=None, prefixes=None):
    """Apply a processor to rows with these tokens; `indices` are those of their inputs."""
    inputs = list(indices or range(len(histories)))
    starts = {index: len(prefix) for index, prefix in enumerate(prefixes or [()] * (max(inputs) + 1))}
    rows = Rows.first(histories, inputs, is_normalized=False)
    rows = dataclasses.replace(rows, inputs=np.asarray(inputs), starts=np.asarray([starts[each] for each in inputs]))
    return processor(logits, rows)


def test_tokens_are_masked_in_all_rows(xp):
    expected = [[1.0, -INFINITY, 0.5, -INFINITY], [0.0, -INFINITY, -1.0, -INFINITY]]
    suppress = SuppressTokens([1, 3])
    for _ in range(2):  # the second step reuses the mask
        np.testing.assert_array_equal(to_host(apply(suppress, [[], []], from_host(xp, LOGITS))), expected)


def test_eos_is_masked_below_the_minimum_length(xp):
    lengths = LengthLimits([LengthRange(0, 9), LengthRange(2, 9)])
    masked = to_host(apply(SuppressTokens([2], below_minimum(lengths)), [[4], [4]], from_host(xp, LOGITS)))
    np.testing.assert_array_equal(masked, [LOGITS[0], [0.0, 4.0, -INFINITY, 2.0]])


def test_repetition_penalty_is_the_formula(xp):
    penalize = partial(penalize_repetition, 2.0, SuppressTokens([]))
    found = apply(penalize, [[0, 1, 1], [3]], from_host(xp, LOGITS))
    assert_close(found, [[0.5, -4.0, 0.5, 3.0], [0.0, 4.0, -1.0, 1.0]], xp=xp)
    assert_close(apply(penalize, [[], []], from_host(xp, LOGITS)), LOGITS, xp=xp)
    found = apply(partial(penalize_repetition, 2.0, SuppressTokens([3])), [[], [2]], from_host(xp, LOGITS))
    assert_close(found, [[1.0, -2.0, 0.5, 1.5], [0.0, 4.0, -2.0, 1.0]], xp=xp)


def test_frequency_and_presence_penalties_count_generated_tokens(xp):
    histories, prefixes = [[1, 0, 3, 3], [2]], [[1], [2]]
    found = apply(partial(penalize_frequency, 0.5, 0.25), histories, from_host(xp, LOGITS), prefixes=prefixes)
    assert_close(found, LOGITS - np.asarray([[0.75, 0.0, 0.0, 1.25], [0.0] * 4]), xp=xp)
    assert_close(apply(partial(penalize_frequency, 1.0, 1.0), [[], []], from_host(xp, LOGITS)), LOGITS, xp=xp)


def test_a_bias_is_added_to_the_logits_of_tokens(xp):
    expected = LOGITS + np.asarray([0.0, -100.0, 0.0, 2.5])
    assert_close(apply(LogitBias({3: 2.5, 1: -100.0}), [[], []], from_host(xp, LOGITS)), expected, xp=xp)


def test_sequence_bias_belongs_to_the_input_of_a_row(xp):
    bias = partial(favor_phrases, [[], [[(1, 3)]]], 1.5)
    found = apply(bias, [[1], [0]], from_host(xp, LOGITS), indices=[1, 0])
    assert_close(found, LOGITS + np.asarray([[0.0, 1.5, 0.0, 3.0], [0.0] * 4]), xp=xp)
    assert_close(apply(bias, [[], []], from_host(xp, LOGITS), indices=[0, 0]), LOGITS, xp=xp)


def test_stop_sequences_end_rows_of_any_length(xp):
    stop = StopSequences([[7], [9, 8], [4] * 6])
    for histories, expected in (
        ([[7], [9, 8, 3], [5, 9, 8]], [True, False, True]),
        ([[8], [9, 9, 8], [3, 3]], [False, True, False]),
        ([[], []], [False, False]),
        ([[4] * 5, [4] * 7], [False, True]),
    ):
        rows = Rows.first(histories, range(len(histories)), is_normalized=False)
        assert to_host(stop(from_host(xp, rows.tokens), from_host(xp, rows.lengths))).tolist() == expected


PROCESSORS = {
    "repetition": lambda: partial(penalize_repetition, 2.0, SuppressTokens([])),
    "frequency": lambda: partial(penalize_frequency, 0.5, 0.25),
    "n-grams": lambda: partial(mask_repeated, 2),
    "suppressed": lambda: SuppressTokens([1]),
    "minimum": lambda: SuppressTokens([2], below_minimum(LengthLimits([LengthRange(3, 9)] * 2))),
    "bias": lambda: LogitBias({1: 2.0}),
    "phrases": lambda: partial(favor_phrases, [[[(1, 3)]], []], 1.5),
}


@for_each("make", PROCESSORS.values())
def test_logits_stay_on_their_device(make):
    strict = pytest.importorskip("array_api_strict", reason="has devices to test with")
    histories, there = [[0, 1, 0], [3]], strict.Device("device1")
    found = apply(make(), histories, strict.asarray(LOGITS, device=there))
    assert found.device == there
    np.testing.assert_array_equal(to_host(found), apply(make(), histories, LOGITS))


def repeating_tokens(xp, size, *histories):
    """Return the tokens that are masked in each row; one further token always stays."""
    logits = from_host(xp, np.zeros((len(histories), 9)))
    return [
        set(np.flatnonzero(row == -INFINITY)) for row in to_host(apply(partial(mask_repeated, size), histories, logits))
    ]


@given(histories=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4), size=st.integers(1, 4))
def test_exactly_the_tokens_that_repeat_an_ngram(histories, size):
    def ngrams(tokens):
        return [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]

    expected = [
        {token for token in range(4) if ngrams([*history, token])[-1:] and ngrams([*history, token])[-1]
         in ngrams(history)}
        for history in histories
    ]  # fmt: skip
    assert repeating_tokens(np, size, *histories) == expected


# --- All together -----------------------------------------------------------------------------------------------------


def process(logits, histories, indices=None, *, ranges=((0, 9),), prefixes=None, sequence_bias=None, user=(), **config):
    """Apply the processors of a batch in which 0 and 1 are suppressed and 2 is eos."""
    batch = SimpleNamespace(
        config=GenerationConfig(**config),
        model=SimpleNamespace(vocab_size=logits.shape[-1]),
        eos_id=2,
        end_ids=frozenset({2, *config.get("stop_token_ids", ())}),
        start=[1],
        lengths=LengthLimits([LengthRange(*limits) for limits in ranges]),
        prefixes=prefixes or [()] * len(ranges),
    )
    processors = build_logits_processors(batch, frozenset((0, 1)), sequence_bias, map(processor_of, user))
    for processor in processors:
        logits = apply(processor, histories, logits, indices or [0] * len(histories), prefixes)
    return logits


def allowed(logits):
    return [set(np.flatnonzero(row > -INFINITY)) for row in to_host(logits)]


@for_each("num_beams", [1, 2])
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
                    user=[lambda tokens, lengths, logits: seen.append(logits) or logits - 1.0])  # fmt: skip
    assert_close(found[:, 2:], expected[:, 2:] - 1.0)
    assert_close(seen[0][:, 2:], expected[:, 2:])
    assert allowed(found) == [{2, 3, 4, 5}]


def test_scores_of_beams_never_increase():
    logits = normal(0, 2, 6)
    found = process(
        logits, [[3], [4]], num_beams=2, user=[lambda tokens, lengths, logits: logits + np.asarray([[9.0], [-9.0]])]
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
    assert allowed(apply(partial(mask_repeated, 1), [[0, 1], [0, 1, 2, 3]], LOGITS)) == [{2, 3}, {0, 1, 2, 3}]


def test_eos_is_allowed_below_the_minimum_if_no_other_token_is():
    assert allowed(process(normal(0, 1, 3), [[]], ranges=[(4, 9)])) == [{2}]


# --- Options and functions of the user --------------------------------------------------------------------------------


MODEL = small_language_model(seed=3)
SETTINGS = [{}, {"num_beams": 3}, {"temperature": 1.0, "rng": Rng(0), "num_return_sequences": 2}]


@for_each("settings", SETTINGS)
def test_penalties_and_biases_change_the_tokens(settings):
    options = {"max_new_tokens": 8, "min_new_tokens": 8, **settings}
    for prompt in ([[3, 4, 5]], [[6, 7], [3]]):
        forced = generate(MODEL, prompt, logit_bias={"9": 100.0}, **options)
        assert all(each.tokens == [9] * 8 for row in forced for each in row)
        distinct = generate(MODEL, prompt, presence_penalty=100.0, **options)
        assert all(len(set(each.tokens)) == 8 for row in distinct for each in row)
        equal = generate(MODEL, prompt, frequency_penalty=-100.0, **options)
        assert all(len(set(each.tokens)) == 1 for row in equal for each in row)


@for_each("bias", [{"a": 1.0}, {3: math.nan}, {3: "1"}, {-1: 1.0}, {3: True}, {True: 1.0}, {1.5: 1.0}])
def test_invalid_biases_are_refused(bias):
    with raises_line(ConfigError, "logit_bias has .*; expected finite numbers by token id"):
        GenerationConfig(logit_bias=bias)


def test_a_bias_outside_the_vocabulary_is_refused():
    with raises_line(DataError, "token id 999 is suppressed, biased or ends outputs; expected 0 to "):
        generate(MODEL, [[3]], logit_bias={999: 1.0})
    config = GenerationConfig(logit_bias={3: 1})
    assert GenerationConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@for_each("settings", SETTINGS)
def test_functions_of_arrays_see_prompt_and_output(settings):
    prompts = [[3, 4, 5], [6]]

    def check(tokens, lengths, rows):
        for row in range(len(rows.lengths)):
            history = rows.history(row)
            assert history[: rows.starts[row]] == prompts[rows.inputs[row]]
            assert tokens[row].tolist() == [-1] * (tokens.shape[1] - lengths[row]) + history
            assert len(history) == lengths[row]

    def processor(tokens, lengths, logits, rows):
        check(tokens, lengths, rows)
        return logits

    def criterion(tokens, lengths, rows):
        check(tokens, lengths, rows)
        assert (lengths > rows.starts).all()
        return tokens[:, -1] == 7

    generate(MODEL, prompts, max_new_tokens=9, logits_processors=[processor], stopping_criteria=[criterion], **settings)


@for_each(
    "hooks, message",
    [
        ({"logits_processors": [lambda histories, logits: logits]}, r"logits processor <lambda> has the parameters"),
        ({"logits_processors": [3]}, "logits processor is 3; expected a function .tokens, lengths, logits."),
        ({"stopping_criteria": [lambda tokens: [True]]}, "stopping criterion <lambda> has the parameters .tokens.;"),
    ],
)
def test_functions_with_other_parameters_are_refused(hooks, message):
    with raises_line(ConfigError, message):
        generate(MODEL, [[3]], max_new_tokens=2, **hooks)


# --- Probabilities of given tokens ------------------------------------------------------------------------------------


@for_each("count", [0, 1, 3])
@for_each("length", [0, 1, 300])  # more rows than are computed at a time
def test_log_probabilities_of_given_tokens_and_of_their_alternatives(length, count):
    logits, tokens = normal(0, length, 7), np.random.default_rng(1).integers(0, 7, length).tolist()
    found, expected = token_alternatives(logits, tokens, count), log_softmax(logits)
    assert [each.token for each in found] == tokens
    np.testing.assert_allclose([each.log_probability for each in found], expected[range(length), tokens])
    for each, row in zip(found, expected, strict=True):
        best = np.argsort(-row)[:count].tolist()
        assert [token for token, _ in each.alternatives] == best
        np.testing.assert_allclose([value for _, value in each.alternatives], row[best])
