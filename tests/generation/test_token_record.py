"""The record of generated tokens."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from xformer.generation import TokenRecord, generate
from xformer.models import LanguageModel, LanguageModelConfig
from xformer.random import Rng

PROMPTS = [[5, 4], [6, 7, 8]]


@pytest.fixture(scope="module")
def model():
    config = LanguageModelConfig(vocab_size=13, d_model=8, num_heads=2, d_ff=16, num_layers=1)
    return LanguageModel(config, xp=np, dtype="float64")


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 3}, {"temperature": 2.0, "rng": Rng(1), "num_return_sequences": 2}]
)
def test_steps_have_the_probabilities_of_the_model(model, settings):
    record = TokenRecord(4)
    hooks = {"logits_processors": [record], "stopping_criteria": [record.observe], "max_new_tokens": 5}
    outputs = generate(model, PROMPTS, **hooks, **settings)
    assert outputs == generate(model, PROMPTS, max_new_tokens=5, **settings)
    for index, (prompt, hypotheses) in enumerate(zip(PROMPTS, outputs, strict=True)):
        for hypothesis in hypotheses:
            steps = record.steps(index, prompt, hypothesis.tokens)
            assert [step.token for step in steps] == hypothesis.tokens
            logits = model([[*prompt, *hypothesis.tokens]])[0, len(prompt) - 1 : -1]
            logits[:, list(model.config.suppressed_ids)] = -np.inf
            log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            for step, row in zip(steps, log_probs, strict=True):
                assert step.log_probability == pytest.approx(row[step.token])
                best = np.argsort(-row)[:4]
                assert [token for token, _ in step.alternatives] == best.tolist()
                np.testing.assert_allclose([value for _, value in step.alternatives], row[best])


def test_the_memory_of_a_record_is_linear_in_the_length(model):
    """Neither each token nor each step keeps all tokens before it."""

    def size(length):
        record = TokenRecord(1)
        hooks = {"logits_processors": [record], "stopping_criteria": [record.observe]}
        generate(model, PROMPTS[:1], max_new_tokens=length, special_tokens=False, **hooks)
        return len(pickle.dumps(record))

    assert size(120) < 2.4 * size(60)


def test_scores_of_beams_are_sums_of_recorded_log_probabilities(model):
    record = TokenRecord(1)
    hooks = {"logits_processors": [record], "stopping_criteria": [record.observe], "max_new_tokens": 5}
    outputs = generate(model, PROMPTS, num_beams=3, repetition_penalty=1.5, special_tokens=False, **hooks)
    for index, (prompt, (output, *_)) in enumerate(zip(PROMPTS, outputs, strict=True)):
        steps = record.steps(index, prompt, output.tokens)
        assert sum(step.log_probability for step in steps) == pytest.approx(output.score)
