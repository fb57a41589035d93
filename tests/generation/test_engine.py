"""Searches that share their steps give the outputs of searches that run alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import xformer as xf
from tests.generation.definitions import SOURCES, varied_model
from tests.reference import raises_line
from xformer.errors import ConfigError, DataError
from xformer.generation import steps
from xformer.generation.batch import GenerationBatch
from xformer.generation.engine import Engine
from xformer.generation.generate import searches_of
from xformer.models.config import POSITIONS
from xformer.tracing.program import CudaProgram

SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 32, "max_positions": 128}
OPTIONS = [
    {"max_new_tokens": 20},
    {"max_new_tokens": 9, "do_sample": True, "rng": xf.Rng(3)},
    {"max_new_tokens": 30, "repetition_penalty": 1.3},
    {"max_new_tokens": 12, "num_beams": 3},
    {"max_new_tokens": 15, "num_beams": 3, "no_repeat_ngram_size": 2},
    {"max_new_tokens": 11, "do_sample": True, "num_return_sequences": 3, "rng": xf.Rng(5)},
]


def new_search(model, inputs, **options):
    (search,) = searches_of(GenerationBatch(model, inputs, None, **options))
    return search


def assert_alike(found, expected):
    assert [[each.tokens for each in row] for row in found] == [[each.tokens for each in row] for row in expected]
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_allclose([x.score for x in row], [x.score for x in other], rtol=0, atol=1e-4)


def run_staggered(model, inputs, options):
    """Run searches that begin three steps apart."""
    engine = Engine(is_shared=True)
    searches = [new_search(model, row, **each) for row, each in zip(inputs, options, strict=True)]
    for search in searches:
        engine.add([search])
        for _ in range(3):
            engine.step()
    while not all(search.done() for search in searches):
        engine.step()
    return [search.result() for search in searches]


@pytest.mark.parametrize(
    ("positions", "window"), [*((each, None) for each in POSITIONS), ("rotary", 4), ("relative", 4)]
)
def test_language_models(positions, window):
    config = xf.LanguageModelConfig(vocab_size=23, num_layers=2, positions=positions, window=window, **SIZES)
    model = xf.LanguageModel(config)
    prompts = [[[3, 4, 5]], [[6], [7, 8, 9, 10]], [list(range(3, 23)) * 2], [[5, 6]], [[9] * 12, [4]], [[8, 9]]]
    found = run_staggered(model, prompts, OPTIONS)
    for outputs, inputs, options in zip(found, prompts, OPTIONS, strict=True):
        assert_alike(outputs, xf.generate(model, inputs, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"positions": "relative"},
        {"positions": "alibi"},
        {"copy": True, "share_embeddings": True, "source_vocab_size": 13},
    ],
    ids=str,
)
def test_encoder_decoders(options):
    model = varied_model(1, **options)
    inputs = [SOURCES[:2], [SOURCES[2]], SOURCES[3:], [[5, 6, 7, 8, 9, 10, 8, 5, 6]], [SOURCES[0]], SOURCES[1:3]]
    found = run_staggered(model, inputs, OPTIONS)
    for outputs, sources, each in zip(found, inputs, OPTIONS, strict=True):
        assert_alike(outputs, xf.generate(model, sources, **each))


@pytest.mark.parametrize("conditions", [None, [4, 6, 5, 4]], ids=str)
def test_searches_that_are_added_together_are_encoded_together(monkeypatch, conditions):
    model = varied_model(1, length_encoding=conditions is not None)
    sources = [SOURCES[0], SOURCES[2], SOURCES[4], [4, 5, 6, 7]]  # of 4 to 7 tokens
    options = [{"max_new_tokens": 6, "length_condition": each and [each]} for each in conditions or [None] * 4]
    expected = [xf.generate(model, [row], **each) for row, each in zip(sources, options, strict=True)]
    sizes, prefill = [], xf.Transformer.prefill
    monkeypatch.setattr(
        xf.Transformer,
        "prefill",
        lambda self, source, **keywords: sizes.append(len(source)) or prefill(self, source, **keywords),
    )
    engine, searches = Engine(), [new_search(model, [row], **each) for row, each in zip(sources, options, strict=True)]
    engine.add(searches)
    while not engine.is_idle:
        engine.step()
    assert sizes == [4]
    for search, each in zip(searches, expected, strict=True):
        assert_alike(search.result(), each)


def test_on_any_library(xp):
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=23, num_layers=1, **SIZES))
    prompts, options = [[[3, 4, 5]], [[6, 7]]], [{"max_new_tokens": 5}, {"max_new_tokens": 3}]
    for outputs, inputs, each in zip(run_staggered(model.to(xp), prompts, options), prompts, options, strict=True):
        assert_alike(outputs, xf.generate(model, inputs, **each))  # on NumPy: jax compiles every length


@pytest.mark.parametrize("num_new", [1, 2, 5])
def test_programs_that_are_captured_later(monkeypatch, num_new):
    """A CUDA graph is captured after two calls of the function, which still read the arrays of the program."""
    monkeypatch.setattr(
        "xformer.generation.steps.compiler", lambda xp: functools.partial(CudaProgram, lambda function: function)
    )
    model = varied_model(1)
    expected = [xf.generate(model, [source], num_beams=1, max_new_tokens=12) for source in SOURCES[:3]]
    inputs = [[source] for source in SOURCES[:3]]
    options = [{"max_new_tokens": 12}, {"max_new_tokens": num_new}, {"max_new_tokens": 12}]
    for _ in range(2):
        found = run_staggered(model, inputs, options)
        assert_alike(found[0], expected[0])
        assert_alike(found[2], expected[2])
        for row, source in zip(expected, inputs, strict=True):
            assert_alike(xf.generate(model, source, max_new_tokens=12), row)


def test_an_error_ends_its_own_search_only():
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=23, num_layers=1, **SIZES))

    def fail(tokens, lengths, logits):
        if lengths[0] > 5:
            raise DataError("no")
        return logits

    engine = Engine(is_shared=True)
    failing = new_search(model, [[3, 4]], max_new_tokens=9, logits_processors=[fail])
    other = new_search(model, [[5]], max_new_tokens=9)
    for search in (failing, other):
        engine.add([search])
    while not other.done():
        engine.step()
    assert_alike(other.result(), xf.generate(model, [[5]], max_new_tokens=9))
    with pytest.raises(DataError, match=r"^no$"):
        failing.result()


def test_an_engine_that_is_closed_ends_its_searches_with_an_error():
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=23, num_layers=1, **SIZES))
    engine, searches = Engine(is_shared=True), [new_search(model, [[token]], max_new_tokens=9) for token in (3, 4)]
    engine.add(searches)
    engine.step()
    engine.close(DataError("the server ends"))
    assert engine.is_idle
    for search in searches:
        with raises_line(DataError, "^the server ends$"):
            search.result()


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=str)
def test_a_long_search_stays_when_others_join(options):
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=23, num_layers=1, **(SIZES | {"max_positions": 256})))
    engine = Engine(is_shared=True)
    settings = [{"max_new_tokens": 100, "min_new_tokens": 100, **options}, {"max_new_tokens": 5, **options}]
    prompts = [[[3] * 3], [[4]]]
    searches = [new_search(model, row, **each) for row, each in zip(prompts, settings, strict=True)]
    engine.add(searches[:1])
    for _ in range(20):
        engine.step()
    engine.add(searches[1:])
    while not all(search.done() for search in searches):
        engine.step()
    for search, row, each in zip(searches, prompts, settings, strict=True):
        assert_alike(search.result(), xf.generate(model, row, **each))


def test_a_long_prompt_does_not_pad_short_ones(monkeypatch):
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=23, num_layers=1, **SIZES))
    shapes, step = [], xf.LanguageModel.decode_step
    monkeypatch.setattr(
        xf.LanguageModel,
        "decode_step",
        lambda self, tokens, *args, **options: shapes.append(tokens.shape) or step(self, tokens, *args, **options),
    )
    Engine(is_shared=True).add([new_search(model, [[3] * length], max_new_tokens=4) for length in (100, 4, 90, 5, 7)])
    assert sorted(shapes) == [(2, 100), (3, 7)]


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_the_cache_of_an_engine_shrinks(positions):
    config = xf.LanguageModelConfig(
        vocab_size=23, num_layers=1, positions=positions, **(SIZES | {"max_positions": 1024})
    )
    model = xf.LanguageModel(config)
    engine = Engine(is_shared=True)
    short, long = (
        new_search(model, prompt, max_new_tokens=count, min_new_tokens=count)
        for prompt, count in (([[3, 4]], 100), ([[5] * 600], 3))
    )
    engine.add([short])
    engine.step()
    engine.add([long])
    sizes = []
    while not short.done():
        engine.step()
        sizes += [group.steps.cache.layers[0].self_attention.key.shape[2] for group in engine._groups.values()]
    assert max(sizes) >= 600
    assert sizes[-1] <= 256
    assert_alike(short.result(), xf.generate(model, [[3, 4]], max_new_tokens=100, min_new_tokens=100))
    assert_alike(long.result(), xf.generate(model, [[5] * 600], max_new_tokens=3, min_new_tokens=3))


class OwnModel:
    """A model of the user: anything with these three attributes."""

    def __init__(self, model):
        self.model, self.config, self.vocab_size = model, model.config, model.vocab_size
        self.init_cache, self.named_parameters = model.init_cache, model.named_parameters

    def decode_step(self, tokens, cache):
        return self.model.decode_step(tokens, cache)


def test_models_of_the_user_need_no_static_cache():
    model = xf.LanguageModel(xf.LanguageModelConfig(vocab_size=23, num_layers=1, **SIZES))
    prompts = [[3, 4], [5, 6]]
    engine, own = Engine(is_shared=True), new_search(OwnModel(model), prompts, max_new_tokens=9)
    engine.add([own])
    while not own.done():
        engine.step()
    assert_alike(own.result(), xf.generate(model, prompts, max_new_tokens=9))
    with pytest.raises(ConfigError, match="prompts have different lengths and OwnModel has no to_static"):
        xf.generate(OwnModel(model), [[3, 4], [5]], max_new_tokens=9)


@pytest.mark.parametrize("copy", [False, True])
def test_the_memory_of_an_engine_shrinks(copy):
    model = varied_model(1, copy=copy, positions="sinusoidal", share_embeddings=copy, source_vocab_size=13)
    engine = Engine(is_shared=True)
    long = [[4, 5, 6, 7, 8, 9] * 10]
    searches = [
        new_search(model, [row], max_new_tokens=count, min_new_tokens=count)
        for row, count in ((SOURCES[0], 20), (long[0], 3))
    ]
    engine.add(searches[:1])
    engine.step()
    engine.add(searches[1:])
    sizes = []
    while not all(search.done() for search in searches):
        engine.step()
        sizes += [group.steps.cache.memory.states.shape[1] for group in engine._groups.values()]
    assert sizes[0] == 60
    assert sizes[-1] == len(SOURCES[0])
    for search, row, count in zip(searches, (SOURCES[0], long[0]), (20, 3), strict=True):
        assert_alike(search.result(), xf.generate(model, [row], max_new_tokens=count, min_new_tokens=count))


def test_programs_for_a_shorter_memory_share_no_arrays_that_steps_change(monkeypatch):
    kept = []
    monkeypatch.setattr(steps._pool, "release", lambda model, key, cache, programs: kept.append(cache))
    model, engine = varied_model(1, positions="sinusoidal", source_vocab_size=13), Engine(is_shared=True)
    inputs = ((SOURCES[0], 24), ([4, 5, 6, 7, 8, 9] * 10, 12))
    engine.add([new_search(model, [row], max_new_tokens=count, min_new_tokens=count) for row, count in inputs])
    while not engine.is_idle:
        engine.step()
    first, second = ([layer.self_attention for layer in cache.layers] for cache in kept)
    for one, other in zip(first, second, strict=True):
        assert not np.shares_memory(one.key, other.key)
        assert not np.shares_memory(one.value, other.value)
