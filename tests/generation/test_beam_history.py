"""The record of a beam search."""

from __future__ import annotations

import numpy as np
import pytest

from xformer.generation import BeamHistory, generate, length_penalty
from xformer.models import Transformer, TransformerConfig

SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
SOURCES = [[5, 6, 7], [8, 4, 4]]


@pytest.fixture(scope="module")
def model():
    return Transformer(TransformerConfig(source_vocab_size=9, target_vocab_size=12, **SIZES), xp=np, dtype="float64")


def paths(steps):
    """Return (tokens, log-probability, score, status) of every candidate, its tokens read through its parents."""
    before, found = {None: ()}, []
    for step in steps:
        after = {}
        for index, candidate in enumerate(step):
            tokens = (*before[candidate.parent], candidate.token)
            found.append((tokens, candidate))
            if candidate.status == "kept":
                after[index] = tokens
        before = after
    return found


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3}, {"num_beams": 4, "num_beam_groups": 2}, {"num_beams": 3, "target_lengths": [4, 5]}],
)
def test_outputs_are_candidates_that_finished(model, settings):
    history = BeamHistory()
    options = {"length_penalty": 0.7, "num_return_sequences": 2, **settings}
    outputs = generate(model, SOURCES, beam_history=history, **options)
    assert outputs == generate(model, SOURCES, **options)
    eos_id = model.config.eos_id
    for index, hypotheses in enumerate(outputs):
        candidates = paths(history.steps[index])
        finished = {tokens: each for tokens, each in candidates if each.status == "finished"}
        assert all(tokens[-1] == eos_id for tokens in finished)
        for hypothesis in hypotheses:
            if hypothesis.finished:
                candidate = finished[(*hypothesis.tokens, eos_id)]
                assert candidate.score == pytest.approx(hypothesis.score)
                assert candidate.log_probability == pytest.approx(hypothesis.log_probability)
        size = settings["num_beams"] // settings.get("num_beam_groups", 1)
        for step in history.steps[index]:
            for group in range(settings.get("num_beam_groups", 1)):
                own = [candidate for candidate in step if candidate.group == group]
                assert sum(candidate.status == "kept" for candidate in own) <= size
                assert [c.log_probability for c in own] == sorted((c.log_probability for c in own), reverse=True)


def test_scores_are_divided_by_the_length_penalty(model):
    history = BeamHistory()
    generate(model, SOURCES[:1], num_beams=2, length_penalty=1.0, max_new_tokens=4, beam_history=history)
    for number, step in enumerate(history.steps[0], start=1):
        for candidate in step:
            assert candidate.score == pytest.approx(candidate.log_probability / length_penalty(number, 1.0))


def test_each_step_is_reported_with_its_best_beam(model):
    seen = []
    history = BeamHistory(lambda *step: seen.append(step))
    generate(model, SOURCES, num_beams=2, max_new_tokens=3, beam_history=history)
    for index in range(2):
        assert [step for i, step, _ in seen if i == index] == history.steps[index]
    best = max((c for c in history.steps[0][0] if c.status == "kept"), key=lambda c: c.log_probability)
    assert seen[0][2] == [best.token]
