"""Draft tokens change the number of steps, and nothing else."""

from __future__ import annotations

import functools
import itertools
import re

import numpy as np
import pytest

import xformer as xf
from tests.generation.definitions import SOURCES, varied_model
from tests.reference import normal, raises_line
from xformer.errors import ConfigError
from xformer.generation import PrefixCache, StopSequences, TokenRecord
from xformer.generation.batch import GenerationBatch
from xformer.generation.engine import Engine
from xformer.generation.generate import searches_of
from xformer.generation.sampling import DraftModel, PromptLookup
from xformer.generation.steps import DecodingSteps
from xformer.models.config import POSITIONS
from xformer.tracing.program import CudaProgram
from xformer.tree import map_arrays

SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 32, "max_positions": 128}
PROMPTS = [[3, 4, 5, 6, 3, 4], [7, 8, 9], [5] * 20, [9, 10, 11, 12, 9, 10, 11]]
LOOKUP = {"prompt_lookup_num_tokens": 4}


def language_model(seed=1, scale=2.0, **options):
    config = xf.LanguageModelConfig(**{"vocab_size": 13, "num_layers": 2, **SIZES, **options})
    model = xf.LanguageModel(config, seed=seed, dtype="float64")
    return map_arrays(lambda array: scale * array + 0.1 * normal(array.size, *array.shape), model)


@pytest.fixture
def steps(monkeypatch):
    """The numbers of new tokens of a row in each step."""
    found, step = [], DecodingSteps.step

    def record(self, tokens, **options):
        found.append(tokens.shape[1])
        return step(self, tokens, **options)

    monkeypatch.setattr(DecodingSteps, "step", record)
    return found


def assert_equal(found, expected):
    assert [[each.tokens for each in row] for row in found] == [[each.tokens for each in row] for row in expected]
    for row, other in zip(found, expected, strict=True):
        assert [each.finished for each in row] == [each.finished for each in other]
        np.testing.assert_allclose([x.score for x in row], [x.score for x in other], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("positions", "window"), [*((each, None) for each in POSITIONS), ("rotary", 4), ("relative", 4)]
)
def test_prompt_lookup(steps, positions, window):
    model = language_model(positions=positions, window=window)
    expected = xf.generate(model, PROMPTS, max_new_tokens=40)
    num_plain = len(steps)
    steps.clear()
    assert_equal(xf.generate(model, PROMPTS, max_new_tokens=40, **LOOKUP), expected)
    assert len(steps) < num_plain
    assert set(steps) <= {1, 5}
    assert_equal(xf.generate(model, PROMPTS[1:2], max_new_tokens=40, **LOOKUP), expected[1:2])


@pytest.mark.parametrize("draft", ["lookup", "model"])
def test_a_kept_cache_does_not_remember_the_length_of_an_earlier_output(draft):
    models = [language_model() for _ in range(2)]

    def generate(index, prompt, num_draft, limit):
        options = {"prompt_lookup_num_tokens": num_draft}
        if draft == "model":
            options = {"draft_model": models[index], "num_draft_tokens": num_draft}
        return xf.generate(models[index], [prompt], max_new_tokens=limit, **options)

    generate(0, [4] * 54, 2, 8)  # its programs begin near the end of a cache of 64 tokens
    for num_draft in (7, 6, 5):
        assert_equal(generate(0, [4] * 6, num_draft, 40), generate(1, [4] * 6, num_draft, 40))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"stop_token_ids": [7], "min_new_tokens": 12},
        {"frequency_penalty": 0.5, "logit_bias": {4: 1.0}},
        {"stopping_criteria": [StopSequences([[3], [5]])]},
        {"special_tokens": False, "max_matching_ngram_size": 3},
        {"sequence_bias": [[[[3, 4]]], [[[5]]], [], []]},
        {"prefix_cache": PrefixCache()},
        {"do_sample": True, "temperature": 0.4},
        {"max_new_tokens": 1},
        {"max_new_tokens": 60},
    ],
    ids=" ".join,
)
def test_options_mean_the_same(options):
    model, options = language_model(num_layers=1), {"max_new_tokens": 20, **options}
    prompts = [PROMPTS[2] * 4, PROMPTS[3] * 10] if "prefix_cache" in options else PROMPTS
    expected = xf.generate(model, prompts, rng=xf.Rng(1), **options)
    for draft in (LOOKUP, {"draft_model": language_model(2, num_layers=1), "num_draft_tokens": 3}):
        assert_equal(xf.generate(model, prompts, rng=xf.Rng(1), **options, **draft), expected)
        parts = zip(*xf.stream(model, prompts, rng=xf.Rng(1), **options, **draft), strict=True)
        assert [[*itertools.chain(*each)] for each in parts] == [row[0].tokens for row in expected]


def test_a_record_of_tokens():
    model, records = language_model(), [TokenRecord(2), TokenRecord(2)]
    for record, options in zip(records, ({}, LOOKUP), strict=True):
        hooks = {"logits_processors": [record], "stopping_criteria": [record.observe]}
        found = xf.generate(model, PROMPTS, max_new_tokens=20, **hooks, **options)
    for index, ((output,), prompt) in enumerate(zip(found, PROMPTS, strict=True)):
        plain, assisted = (record.steps(index, prompt, output.tokens) for record in records)
        assert [each.token for each in assisted] == [each.token for each in plain] == output.tokens
        values = [[each.log_probability for each in steps] for steps in (plain, assisted)]
        np.testing.assert_allclose(*values, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "options",
    [{}, {"positions": "relative"}, {"copy": True, "share_embeddings": True}, {"length_encoding": True}],
    ids=str,
)
def test_encoder_decoders(steps, options):
    if "copy" in options:
        options = {**options, "source_vocab_size": 13}
    model, limits = varied_model(1, **options), {"min_new_tokens": 30, "max_new_tokens": 40}
    if "length_encoding" in options:
        limits["length_condition"] = [30, 35, 31, 32, 30]
    expected = xf.generate(model, SOURCES, **limits)
    num_plain = len(steps)
    assert_equal(xf.generate(model, SOURCES, **limits, **LOOKUP), expected)
    assert len(steps) - num_plain < num_plain


def test_speculative_decoding(steps):
    model = language_model()
    expected = xf.generate(model, PROMPTS[:1], max_new_tokens=24, special_tokens=False)
    for draft in (model, language_model(5, positions="rotary", num_layers=1)):
        steps.clear()
        options = {"max_new_tokens": 24, "special_tokens": False, "draft_model": draft, "num_draft_tokens": 4}
        assert_equal(xf.generate(model, PROMPTS[:1], **options), expected)
        if draft is model:  # all draft tokens are right: the first token is that of the prompt, then 5 a step
            assert steps.count(5) == 5
        with xf.record(model, "logits"):  # without programs of steps
            assert_equal(xf.generate(model, PROMPTS[:1], **options), expected)
    short = language_model(2, positions="learned", max_positions=10)  # proposes nothing beyond its positions
    assert_equal(xf.generate(model, PROMPTS[:1], **options | {"draft_model": short}), expected)


def test_on_any_library(xp):
    model = language_model(num_layers=1)
    prompts = PROMPTS[:1]  # JAX compiles every operation for every shape
    expected = xf.generate(model, prompts, max_new_tokens=4)
    model, draft = model.to(xp), language_model(2, num_layers=1).to(xp)
    assert_equal(xf.generate(model, prompts, max_new_tokens=4, **LOOKUP), expected)
    options = {"draft_model": draft, "num_draft_tokens": 2}
    assert_equal(xf.generate(model, prompts, max_new_tokens=4, **options), expected)


@pytest.mark.parametrize("is_graph", [False, True])
def test_searches_of_an_engine(monkeypatch, is_graph):
    if is_graph:  # captured after two calls of the function, see test_engine.py
        new_program = functools.partial(CudaProgram, lambda function: function)
        monkeypatch.setattr("xformer.generation.steps.compiler", lambda xp: new_program)
    model = language_model(num_layers=1)
    options = [LOOKUP, {}, {"prompt_lookup_num_tokens": 2}, LOOKUP, {"num_beams": 2}]
    prompts = [*PROMPTS, PROMPTS[0]]
    for _ in range(2):  # the second time with kept programs
        engine, searches = Engine(is_shared=True), []
        for prompt, each in zip(prompts, options, strict=True):
            searches += searches_of(GenerationBatch(model, [prompt], max_new_tokens=40, **each))
            engine.add(searches[-1:])
            for _ in range(3):
                engine.step()
        while not engine.is_idle:
            engine.step()
        for search, prompt, each in zip(searches, prompts, options, strict=True):
            plain = {"num_beams": each.get("num_beams", 1)}
            assert_equal(search.result(), xf.generate(model, [prompt], max_new_tokens=40, **plain))


def test_drafts():
    lookup = PromptLookup(3, 2)
    assert lookup([5]) == []
    assert lookup([5, 6, 5]) == [6, 5, 6]  # what follows repeats
    assert lookup([5, 6, 5, 7, 8, 9, 5]) == [7, 8, 9]  # the latest occurrence
    assert lookup([5, 6, 5, 7, 8, 9, 5, 6]) == [5, 7, 8]  # the longer n-gram
    model = language_model(3)
    ((output,),) = xf.generate(model, [[4, 5]], max_new_tokens=6, special_tokens=False)
    draft = DraftModel(model, 4)
    assert draft([4, 5]) == output.tokens[:4]
    assert draft([4, 5, *output.tokens[:2]]) == output.tokens[2:6]
    for token in range(3, 11):  # differs from what entered the model before the last token
        assert draft([4, 5, token, 12]) == DraftModel(model, 4)([4, 5, token, 12])
    assert draft([4, 5, *output.tokens[:1], 8]) == draft([4, 5, *output.tokens[:1], 8])


def test_errors():
    model, other = language_model(), language_model(vocab_size=14)
    translator = varied_model(1)
    for options, message in (
        ({**LOOKUP, "num_beams": 2}, "prompt_lookup_num_tokens is given, num_beams is 2 and num_return_sequences 1;"),
        ({"draft_model": model, "num_beams": 2}, "draft_model is given, num_beams is 2 and num_return_sequences"),
        ({**LOOKUP, "do_sample": True, "num_return_sequences": 2}, "prompt_lookup_num_tokens is given, num_beams is 1"),
        ({**LOOKUP, "draft_model": model}, "prompt_lookup_num_tokens and draft_model are both given; expected"),
        ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0; expected"),
        ({"prompt_lookup_num_tokens": 2.5}, "prompt_lookup_num_tokens is 2.5; expected"),
        ({"max_matching_ngram_size": 0}, "max_matching_ngram_size is 0; expected"),
        ({"assistant_model": other}, "unknown argument 'assistant_model'; use draft_model, an argument of generate"),
        ({"num_assistant_tokens": 5}, "unknown argument 'num_assistant_tokens'; use num_draft_tokens"),
        ({"num_draft_tokens": "5"}, "num_draft_tokens is '5'; expected"),
        ({"num_draft_tokens": 5}, "num_draft_tokens is 5 and no draft_model is used; expected both, or neither"),
        ({"draft_model": other}, "draft_model has 14 tokens and the model 13; expected the same vocabulary"),
        ({"draft_model": "gpt2"}, "the model is a LanguageModel and draft_model a str; expected language mod"),
    ):
        with raises_line(ConfigError, re.escape(message)):
            xf.generate(model, PROMPTS, rng=xf.Rng(0), **options)
    with raises_line(ConfigError, "the model is a Transformer and draft_model a LanguageModel; expected language"):
        xf.generate(translator, SOURCES, draft_model=model)

    class Plain:
        config, vocab_size = model.config, model.vocab_size
        decode_step, init_cache, named_parameters = model.decode_step, model.init_cache, model.named_parameters

    with raises_line(ConfigError, re.escape("Plain has no to_static(cache, max_length); expected a model that has it")):
        xf.generate(Plain(), PROMPTS[:1], **LOOKUP)
