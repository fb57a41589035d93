import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import library_or_skip
from tests.generation import definitions
from tests.generation.definitions import SEEDS, SOURCES, Models, padded, rescored, varied_model
from tests.reference import for_each, raises_line, small_model
from xformer.errors import ConfigError, DataError
from xformer.generation import GenerationConfig, generate
from xformer.random import Rng

limited = settings(max_examples=8)
METHODS = {
    "greedy": {},
    "beam": {"num_beams": 4},
    "groups": {"num_beams": 4, "num_beam_groups": 2},
    "groups of one": {"num_beams": 4, "num_beam_groups": 4},
    "sampling": {"temperature": 1.0},
}
methods = st.sampled_from(sorted(METHODS))


@pytest.fixture(scope="module")
def models():
    return Models(varied_model(seed) for seed in SEEDS[:3])


@pytest.fixture(scope="module")
def model(models):
    return models[0]


def run(model, rows, method="greedy", *, max_new_tokens=8, rng=None, **options):
    """Generate by one of the methods; keywords are arguments of generate or fields of the config."""
    options = {**METHODS[method], "max_new_tokens": max_new_tokens, **options}
    return generate(model, padded(rows), rng=rng or Rng(5), **options)


def tokens(found):
    return [[hypothesis.tokens for hypothesis in hypotheses] for hypotheses in found]


def test_the_default_is_greedy_search(model):
    found = generate(model, padded(SOURCES))
    for row, (hypothesis,) in zip(SOURCES, found, strict=True):
        tokens, total, finished = definitions.greedy(model, row, 2 * (len(row) - 1) + 20)
        assert (hypothesis.tokens, hypothesis.finished) == (tokens, finished)
        assert hypothesis.log_probability == pytest.approx(total, abs=1e-9)


# --- Lengths ----------------------------------------------------------------------------------------------------------


@limited
@given(seed=st.integers(0, 2), method=methods, minimum=st.integers(0, 5), more=st.integers(0, 4))
def test_lengths_are_kept(models, seed, method, minimum, more):
    maximum = max(1, minimum + more)
    for hypotheses in run(models[seed], SOURCES, method, min_new_tokens=minimum, max_new_tokens=maximum):
        for hypothesis in hypotheses:
            assert minimum <= len(hypothesis.tokens) <= maximum
            assert hypothesis.finished or len(hypothesis.tokens) == maximum


@for_each("method", METHODS)
def test_ratios_are_kept(models, method):
    for model in models:
        found = run(model, SOURCES, method, max_new_tokens=None, min_length_ratio=0.5, max_length_ratio=1.5)
        for row, (hypothesis, *_) in zip(SOURCES, found, strict=True):
            words = len(row) - 1
            assert np.ceil(0.5 * words) <= len(hypothesis.tokens) <= max(1, int(1.5 * words))


def test_ratios_do_not_count_padding_without_an_id():
    model = varied_model(pad_id=None)
    found = generate(model, [[4, 5, 6, 7], [8], [9, 10]], min_length_ratio=2.0, max_length_ratio=2.0)
    assert [len(hypothesis.tokens) for (hypothesis,) in found] == [8, 2, 4]


@for_each("desired", [1, 3, 6, 10])
def test_beam_search_reaches_target_lengths(models, desired):
    for model in models:
        for hypotheses in run(model, SOURCES, "beam", max_new_tokens=None, target_lengths=[desired] * 5):
            assert hypotheses[0].finished
            assert abs(len(hypotheses[0].tokens) - desired) <= 0.1 * desired
        for hypotheses in run(model, SOURCES, "groups", max_new_tokens=None, length_tolerance=0.5,
                              target_lengths=[desired] * 5):  # fmt: skip
            assert hypotheses[0].finished
            assert abs(len(hypotheses[0].tokens) - desired) <= 0.5 * desired


def evens(tokens):
    """A length in another unit, to which only even tokens add, as with words of several tokens."""
    return sum(token % 2 == 0 for token in tokens)


@for_each("method", ["beam", "groups", "groups of one", "sampling"])
@for_each("desired", [1, 5])
def test_lengths_in_another_unit_are_kept(models, method, desired):
    for model in models:
        found = run(model, SOURCES, method, max_new_tokens=None, target_lengths=[desired] * 5, length_fn=evens)
        for hypothesis, *_ in found:
            assert evens(hypothesis.tokens) <= desired + 0.1 * desired
            if method != "sampling":  # a sample may be cut
                assert hypothesis.finished
                assert evens(hypothesis.tokens) >= desired - 0.1 * desired
        if method != "sampling":
            alone = [run(model, [row], method, max_new_tokens=None, target_lengths=[desired], length_fn=evens)[0]
                     for row in SOURCES]  # fmt: skip
            assert tokens(found) == tokens(alone)


def test_a_prefix_may_not_be_longer_than_the_output_in_any_unit(model):
    prefix, lengths = [[4, 6, 8], [4], [5], [], [7]], [2] * 5
    with raises_line(ConfigError, "prefix 1 has length 3; expected at most 2"):
        run(model, SOURCES, "beam", max_new_tokens=None, prefix=prefix, target_lengths=lengths, length_fn=evens)
    prefix[0] = [5, 4, 7, 9, 5, 8, 5]
    found = run(model, SOURCES, "beam", max_new_tokens=None, prefix=prefix, target_lengths=lengths, length_fn=evens)
    for (hypothesis, *_), begun in zip(found, prefix, strict=True):
        assert hypothesis.tokens[: len(begun)] == begun
        assert (evens(hypothesis.tokens), hypothesis.finished) == (2, True)


def test_the_length_condition_defaults_to_the_target():
    model = varied_model(length_encoding=True)
    found = run(model, SOURCES, "beam", max_new_tokens=None, target_lengths=[4, 5, 6, 7, 8])
    assert [len(one[0].tokens) for one in found] == [4, 5, 6, 7, 8]
    single = [run(model, [row], "beam", max_new_tokens=None, target_lengths=[n])[0]
              for row, n in zip(SOURCES, [4, 5, 6, 7, 8], strict=True)]  # fmt: skip
    assert tokens(found) == tokens(single)
    with raises_line(ConfigError, "this model has a length encoding; expected target_lengths, one per input"):
        run(model, SOURCES)


def test_learned_positions_limit_the_length():
    model = varied_model(max_positions=6)
    for hypotheses in run(model, SOURCES[1:4], "beam", max_new_tokens=None, min_new_tokens=5):
        assert len(hypotheses[0].tokens) == 5


def test_a_minimum_beyond_the_learned_positions_raises():
    model = varied_model(max_positions=6)
    with raises_line(ConfigError, "the output needs 6 tokens, prompt included; this model has learned positions for 5"):
        run(model, SOURCES, "beam", max_new_tokens=None, min_new_tokens=6)


def test_tokens_may_be_suppressed(models):
    usual = {token for hypotheses in run(models[0], SOURCES) for token in hypotheses[0].tokens}
    banned = sorted(usual)[:2]
    for method in ("greedy", "beam"):
        for hypotheses in run(models[0], SOURCES, method, suppress_tokens=banned):
            assert not set(hypotheses[0].tokens) & set(banned)


# --- Prefixes ---------------------------------------------------------------------------------------------------------


@limited
@given(seed=st.integers(0, 2), method=methods, data=st.data())
def test_outputs_begin_with_their_prefixes(models, seed, method, data):
    prefixes = data.draw(st.lists(st.lists(st.integers(3, 12), max_size=4), min_size=5, max_size=5))
    found = run(models[seed], SOURCES, method, prefix=prefixes)
    for row, prefix, hypotheses in zip(SOURCES, prefixes, found, strict=True):
        (single,) = run(models[seed], [row], method, prefix=[prefix],
                        indices=[SOURCES.index(row)])  # fmt: skip
        assert tokens([hypotheses]) == tokens([single])
        for hypothesis in hypotheses:
            assert hypothesis.tokens[: len(prefix)] == prefix
            full = rescored(models[seed], row, hypothesis.tokens, finished=hypothesis.finished)
            given_part = rescored(models[seed], row, prefix, finished=False)
            assert hypothesis.log_probability == pytest.approx(full - given_part, abs=1e-9)


def test_invalid_prefixes_raise(model):
    with raises_line(ConfigError, "prefix 2 has length 3; expected at most 2, the maximum length of the output"):
        run(model, SOURCES[:2], max_new_tokens=2, prefix=[[], [3, 4, 5]])
    with raises_line(DataError, "prefix has 1 entries for 5 inputs"):
        run(model, SOURCES, prefix=[[3]])
    with raises_line(DataError, "prefix 1 has token id 13; expected 0 to 12"):
        run(model, SOURCES[:1], prefix=[[13]])
    with raises_line(DataError, "prefix 1 has eos_id 2"):
        run(model, SOURCES[:1], prefix=[[3, 2]])


def test_errors_name_a_prefix_by_the_number_of_its_sentence(model):
    with raises_line(ConfigError, "prefix 8 has length 3; expected at most 2"):
        run(model, SOURCES[:2], max_new_tokens=2, prefix=[[], [3, 4, 5]], indices=[4, 7])
    prefix, settings = [[], [4, 6, 8]], {"target_lengths": [2, 2], "length_fn": evens}
    with raises_line(ConfigError, "prefix 8 has length 3; expected at most 2"):
        run(model, SOURCES[:2], max_new_tokens=None, prefix=prefix, indices=[4, 7], **settings)
    for token in (13, 2):
        with raises_line(DataError, "prefix 8 has"):
            run(model, SOURCES[:2], prefix=[[], [token]], indices=[4, 7])


# --- Repetitions, topics ----------------------------------------------------------------------------------------------


@limited
@given(seed=st.integers(0, 2), method=methods, size=st.integers(1, 3))
def test_no_ngram_is_repeated(models, seed, method, size):
    for hypotheses in run(
        models[seed], SOURCES, method, max_new_tokens=10, no_repeat_ngram_size=size, min_new_tokens=6
    ):
        for hypothesis in hypotheses:
            ngrams = [tuple(hypothesis.tokens[i : i + size]) for i in range(len(hypothesis.tokens) - size + 1)]
            assert len(ngrams) == len(set(ngrams))


def contains(row, phrase):
    return any(row[i : i + len(phrase)] == phrase for i in range(len(row)))


@for_each("method", ["greedy", "beam", "sampling"])
def test_phrases_of_several_tokens_are_favored(models, method):
    phrases = [[11, 6, 4], [9, 12]]

    def count(strength):
        found = [
            hypotheses[0].tokens
            for model in models
            for hypotheses in run(
                model,
                SOURCES,
                method,
                max_new_tokens=10,
                sequence_bias_strength=strength,
                sequence_bias=[[[phrase] for phrase in phrases]] * 5,
            )
        ]
        return sum(contains(row, phrase) for row in found for phrase in phrases)

    assert count(0.0) < count(3.0) <= count(12.0)
    assert count(12.0) > 20  # of 30


def test_a_strong_bias_yields_a_phrase_once(model):
    for hypotheses in run(model, SOURCES, sequence_bias=[[[[7, 8]]]] * 5, sequence_bias_strength=100.0):
        row = hypotheses[0].tokens
        assert sum(row[i : i + 2] == [7, 8] for i in range(len(row))) == 1
        assert row[:2] == [7, 8]


def test_phrases_belong_to_inputs(model):
    alone = run(model, SOURCES, "beam")
    some = run(model, SOURCES, "beam", sequence_bias=[[], [[[7, 8]]], [], [], []], sequence_bias_strength=50.0)
    assert [a == b for a, b in zip(tokens(alone), tokens(some), strict=True)] == [True, False, True, True, True]


# --- Sampling ---------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens(model):
    first, second = (run(model, SOURCES, "sampling", rng=Rng(7)) for _ in range(2))
    assert first == second
    assert tokens(first) != tokens(run(model, SOURCES, "sampling", rng=Rng(8)))


@limited
@given(seed=st.integers(0, 2), order=st.permutations(range(5)), num_return_sequences=st.integers(1, 3))
def test_samples_do_not_depend_on_the_batch(models, seed, order, num_return_sequences):
    full = run(models[seed], SOURCES, "sampling", num_return_sequences=num_return_sequences)
    shuffled = run(
        models[seed], [SOURCES[i] for i in order], "sampling", num_return_sequences=num_return_sequences, indices=order
    )
    assert tokens(shuffled) == [tokens(full)[i] for i in order]
    single = run(models[seed], [SOURCES[3]], "sampling", num_return_sequences=num_return_sequences, indices=[3])
    assert tokens(single) == [tokens(full)[3]]


def test_a_higher_limit_only_extends_samples(model):
    short, long = (run(model, SOURCES, "sampling", max_new_tokens=limit) for limit in (3, 8))
    assert [one[0].tokens[:3] for one in long] == [one[0].tokens for one in short]


def test_several_samples_are_independent_and_sorted(model):
    (found,) = run(model, SOURCES[:1], "sampling", num_return_sequences=30)
    assert len(found) == 30
    assert len({tuple(hypothesis.tokens) for hypothesis in found}) > 5
    assert [(not h.finished, -h.score) for h in found] == sorted((not h.finished, -h.score) for h in found)
    for hypothesis in found:
        expected = rescored(model, SOURCES[0], hypothesis.tokens, finished=hypothesis.finished)
        assert hypothesis.log_probability == pytest.approx(expected, abs=1e-9)


def test_first_tokens_are_drawn_as_the_model_says(model):
    """Chi-square over 3000 samples of one token; 45 is beyond the 99.99th percentile for 10 degrees of freedom."""
    (found,) = run(model, SOURCES[:1], "sampling", max_new_tokens=1, num_return_sequences=3000)
    first = [hypothesis.tokens[0] if hypothesis.tokens else 2 for hypothesis in found]
    logits = np.array(model([SOURCES[0]], [[1]])[0, -1])
    logits[:2] = -np.inf
    expected = 3000 * np.exp(logits) / np.exp(logits).sum()
    counts = np.bincount(first, minlength=13)
    common = expected > 5
    assert counts[:2].sum() == 0
    assert ((counts - expected)[common] ** 2 / expected[common]).sum() < 45


@pytest.mark.parametrize("library", ["torch", "jax", "array_api_strict"])
def test_every_library_draws_the_same_samples(model, library):
    xp = library_or_skip(library)
    options = GenerationConfig(
        top_k=5, top_p=0.9, min_p=0.05, temperature=1.2, num_return_sequences=2, max_new_tokens=2
    )
    expected = generate(model, padded(SOURCES[:2]), options, rng=Rng(1))
    assert tokens(generate(model.to(xp), padded(SOURCES[:2]), options, rng=Rng(1))) == tokens(expected)


# --- Bad input --------------------------------------------------------------------------------------------------------


def test_an_empty_batch(model):
    for method in METHODS.values():
        assert generate(model, np.zeros((0, 3), dtype="int64"), GenerationConfig(**method), rng=Rng(0)) == []


def test_invalid_arguments_raise(model):
    with raises_line(ConfigError, r"the config samples and rng is None; .*rng=Rng\(0\)"):
        generate(model, padded(SOURCES), GenerationConfig(temperature=1.0))
    for method in ("greedy", "sampling"):
        with raises_line(DataError, "indices has 2 entries for 5 inputs"):
            run(model, SOURCES, method, indices=[0, 1])
    with raises_line(ConfigError, "target length 1 is 0"):
        run(model, SOURCES[:1], max_new_tokens=None, target_lengths=[0])
    with raises_line(ConfigError, "both a target length and max_new_tokens are set"):
        run(model, SOURCES[:1], target_lengths=[3])
    with raises_line(DataError, "sequence_bias has 1 entries for 5 inputs"):
        run(model, SOURCES, sequence_bias=[[]])
    with raises_line(DataError, "source ids range from 4 to 11"):
        generate(model, [[4, 11]])


def test_a_model_without_a_decoder():
    with raises_line(ConfigError, "this model has no decoder"):
        generate(small_model(num_decoder_layers=0), [[4, 2]])


@for_each("num_beams", [1, 3])
def test_an_end_that_is_also_padding_ends_outputs(num_beams):
    """GPT-2 and others have pad_id = eos_id: the end must not be suppressed, and no source is masked by its id."""
    config = GenerationConfig(num_beams=num_beams, max_new_tokens=6)
    sources, reference = [[4, 5, 2], [6, 2, 7]], small_model(seed=3, pad_id=None)
    model = reference.__class__(dataclasses.replace(reference.config, pad_id=2), seed=3, dtype="float64")
    outputs = generate(model, sources, config)
    assert [[each.tokens for each in row] for row in outputs] == [
        [each.tokens for each in row] for row in generate(reference, sources, config)
    ]
