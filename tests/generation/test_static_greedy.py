"""Steps of one shape give the same tokens and scores as steps of growing shapes."""

from __future__ import annotations

import gc
import importlib
import weakref

import numpy as np
import pytest

from tests.generation.definitions import SOURCES, padded, varied_model
from tests.reference import small_language_model
from xformer.generation import GenerationConfig, generate
from xformer.generation.greedy_sampling import greedy_or_sample
from xformer.generation.lengths import LengthRange
from xformer.generation.static_greedy import is_supported, static_greedy
from xformer.tracing.program import Program

# These functions have the names of their modules.
generate_module = importlib.import_module("xformer.generation.generate")
static_greedy_module = importlib.import_module("xformer.generation.static_greedy")
POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "relative", "none"]
COPY = {"copy": True, "share_embeddings": True, "source_vocab_size": 13}
PROMPTS = [[3, 4, 5], [6, 7, 8]]


class CallAgain:
    """A program that calls the function again; `steps` counts calls."""

    steps = 0

    def __init__(self, function, args, keywords):
        model, state = args
        model = weakref.proxy(model)  # kept by the caller
        self.call = lambda: function(model, state)
        self.run()

    def run(self, data=()):
        type(self).steps += 1
        self.call()


def both(monkeypatch, call, new_program=CallAgain):
    """Return the results of a call with either search."""
    found = []
    for run in (greedy_or_sample, lambda batch: static_greedy(batch, new_program)):
        monkeypatch.setattr(generate_module, "search", run)
        found.append(call())
    return found


def assert_alike(grown, fixed):
    assert [[one.tokens for one in row] for row in fixed] == [[one.tokens for one in row] for row in grown]
    for ours, theirs in zip(fixed, grown, strict=True):
        assert [one.finished for one in ours] == [one.finished for one in theirs]
        assert [one.score for one in ours] == pytest.approx([one.score for one in theirs], rel=1e-9)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("new_program", [CallAgain, Program])
def test_translations(monkeypatch, positions, new_program):
    model = varied_model(1, positions=positions)
    config = GenerationConfig(min_new_tokens=2)
    grown, fixed = both(monkeypatch, lambda: generate(model, padded(SOURCES), config), new_program)
    assert len({len(row[0].tokens) for row in grown}) > 1
    assert_alike(grown, fixed)


def test_on_every_library(monkeypatch, xp):
    model = varied_model(2).to(xp)
    assert_alike(*both(monkeypatch, lambda: generate(model, padded(SOURCES), GenerationConfig(max_new_tokens=9))))


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("positions", POSITIONS)
def test_continuations(monkeypatch, positions, special_tokens):
    model = small_language_model(positions=positions, seed=3)
    options = GenerationConfig(max_new_tokens=20)
    for new_program in (CallAgain, Program):
        assert_alike(
            *both(monkeypatch, lambda: generate(model, PROMPTS, options, special_tokens=special_tokens), new_program)
        )


def test_limits_of_their_own_and_a_prefix(monkeypatch):
    model = varied_model(3)
    options = GenerationConfig(max_length_ratio=1.5, min_length_ratio=0.5)
    assert_alike(*both(monkeypatch, lambda: generate(model, padded(SOURCES), options, prefix=[[5]] * len(SOURCES))))


def test_the_search_ends_soon_after_all_sentences_did(monkeypatch):
    model = varied_model(1)
    monkeypatch.setattr(CallAgain, "steps", 0)
    grown, fixed = both(monkeypatch, lambda: generate(model, padded(SOURCES), GenerationConfig(max_new_tokens=300)))
    assert_alike(grown, fixed)
    longest = max(len(row[0].tokens) for row in grown)
    assert longest < 200
    assert CallAgain.steps <= longest + 16


def test_outputs_at_their_limits_do_not_delay_the_end(monkeypatch):
    model = varied_model(3, positions="sinusoidal")
    monkeypatch.setattr(CallAgain, "steps", 0)

    def with_limits(batch):
        batch.lengths.ranges[:] = [LengthRange(0, maximum) for maximum in (300, 3)]  # the first ends after 2 tokens
        return static_greedy(batch, CallAgain)

    monkeypatch.setattr(generate_module, "search", with_limits)
    found = generate(model, padded(SOURCES[:2]), GenerationConfig(max_new_tokens=300))
    assert [(len(row[0].tokens), row[0].finished) for row in found] == [(2, True), (3, False)]
    assert CallAgain.steps < 20
    monkeypatch.setattr(CallAgain, "steps", 0)
    monkeypatch.setattr(generate_module, "search", lambda batch: static_greedy(batch, CallAgain))
    assert len(generate(small_language_model(), PROMPTS, GenerationConfig(max_new_tokens=1), special_tokens=False)) == 2
    assert CallAgain.steps == 0  # no token comes after the only one


@pytest.mark.parametrize("new_program", [CallAgain, Program])
@pytest.mark.parametrize("settings", [{}, {"positions": "rotary", **COPY}], ids=["learned", "copy"])
def test_a_program_is_made_once_for_inputs_of_the_same_shapes(monkeypatch, settings, new_program):
    made = []
    model, config = varied_model(1, **settings), GenerationConfig(min_new_tokens=2, max_new_tokens=9)
    sources = [padded(rows) for rows in (SOURCES, SOURCES[::-1], [[7, 7, 2], *SOURCES[1:]])]
    copies = [source.copy() for source in sources]
    expected = [generate(model, source, config) for source in sources]

    def static(batch):
        return static_greedy(batch, lambda *args: made.append(1) or new_program(*args))

    monkeypatch.setattr(generate_module, "search", static)
    for source, grown in zip(sources, expected, strict=True):
        assert_alike(grown, generate(model, source, config))
    assert len(made) == 1
    np.testing.assert_array_equal(sources, copies)
    generate(model, padded(SOURCES[:2]), config)
    assert len(made) == 2
    for rows in range(1, 12):  # of which the last ones are kept
        generate(model, padded([[5, 2]] * rows), config)
    kept = static_greedy_module._kept
    assert len(kept._models[model]) == kept._max_entries
    monkeypatch.setattr(kept, "_max_bytes", 10)
    generate(model, padded([[5, 2]]), config)
    assert not kept._models[model]
    released = weakref.ref(model)
    del model
    gc.collect()
    assert released() is None


@pytest.mark.parametrize(
    ("settings", "fixed"),
    [
        ({}, True),
        ({"prefix": [[5, 6], [6, 5], [5, 5]]}, True),
        ({"num_beams": 2}, False),
        ({"repetition_penalty": 1.5}, False),
        ({"no_repeat_ngram_size": 2}, False),
        ({"sequence_bias": [[[[5]]], [], []]}, False),
        ({"prefix": [[5], [5, 6], [5]]}, True),
        ({"window": 3}, True),
        ({"logits_processors": [lambda histories, logits: logits]}, False),
        ({"stopping_criteria": [lambda histories: [False] * len(histories)]}, False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_supported_settings(monkeypatch, settings, fixed):
    batches, search = [], generate_module.search
    monkeypatch.setattr(generate_module, "search", lambda batch: batches.append(batch) or search(batch))
    model_settings = {name: settings.pop(name) for name in ("window",) if name in settings}
    own = {
        name: settings.pop(name)
        for name in ("prefix", "sequence_bias", "logits_processors", "stopping_criteria")
        if name in settings
    }
    generate(
        varied_model(1, **model_settings), padded(SOURCES[:3]), GenerationConfig(max_new_tokens=5, **settings), **own
    )
    assert is_supported(batches[0]) is fixed
