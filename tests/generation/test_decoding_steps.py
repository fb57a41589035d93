"""Replayed steps give the logits of steps that are computed."""

from __future__ import annotations

import numpy as np
import pytest

from tests.generation.definitions import SOURCES, padded, varied_model
from tests.reference import small_language_model
from xformer import Rng
from xformer.generation import GenerationConfig, generate
from xformer.generation.decoding_steps import DecodingSteps
from xformer.replay.recording import Recording

POSITIONS = ["sinusoidal", "learned", "rotary", "alibi", "relative", "none"]
CONFIGS = {
    "greedy": GenerationConfig(min_new_tokens=12, max_new_tokens=36),
    "sampling": GenerationConfig(do_sample=True, num_return_sequences=2, min_new_tokens=12, max_new_tokens=36),
    "beam": GenerationConfig(num_beams=3, num_return_sequences=2, max_new_tokens=36, length_penalty=0.6),
}


def both(monkeypatch, call):
    """Return the results of a call without and with replays, and the number of replays."""
    replays, replay = [], Recording.replay
    monkeypatch.setattr(Recording, "replay", lambda self, *args: replays.append(1) or replay(self, *args))
    replayed = call()
    with monkeypatch.context() as patch:
        patch.setattr(DecodingSteps, "_should_record", lambda self, tokens: False)
        return call(), replayed, len(replays)


def assert_equal_outputs(expected, actual):
    assert [[each.tokens for each in row] for row in actual] == [[each.tokens for each in row] for row in expected]
    for first, second in zip(expected, actual, strict=True):
        assert [each.score for each in first] == pytest.approx([each.score for each in second], rel=1e-9)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_translations(monkeypatch, positions, config):
    model = varied_model(1, positions=positions)
    expected, actual, replays = both(monkeypatch, lambda: generate(model, padded(SOURCES), config, rng=Rng(0)))
    assert replays > 3
    assert_equal_outputs(expected, actual)


@pytest.mark.parametrize("length", [29, 30, 31, 80])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_continuations_longer_than_the_first_capacity(monkeypatch, config, length):
    model = small_language_model(positions="rotary", seed=3)
    expected, actual, replays = both(
        monkeypatch,
        lambda: generate(
            model, [[3, 4, 5], [6, 7, 8]], config, rng=Rng(0), max_new_tokens=length, min_new_tokens=length
        ),
    )
    assert replays > length / 2
    assert_equal_outputs(expected, actual)


def test_a_quantized_model_is_replayed(monkeypatch):
    model = varied_model(1).quantize()
    expected, actual, replays = both(monkeypatch, lambda: generate(model, padded(SOURCES), CONFIGS["beam"]))
    assert replays > 3
    assert_equal_outputs(expected, actual)


def test_a_model_that_reads_values_is_called(monkeypatch):
    model = varied_model(1)
    step = type(model).decode_step
    monkeypatch.setattr(
        type(model), "decode_step", lambda self, tokens, cache: step(self, tokens, cache) * float(np.ones(1)[0])
        + 0.0 * float(tokens[0, 0])
    )  # fmt: skip
    expected, actual, replays = both(monkeypatch, lambda: generate(model, padded(SOURCES), CONFIGS["greedy"]))
    assert replays == 0
    assert_equal_outputs(expected, actual)
