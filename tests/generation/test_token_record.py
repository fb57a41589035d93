"""The record of generated tokens."""

from __future__ import annotations

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
