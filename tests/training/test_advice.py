"""Out of memory: the model's fault, or a batch's."""

from __future__ import annotations

import pytest

from tests.reference import small_language_model
from xformer.training import LanguageModelSettings, TrainingSettings
from xformer.training.advice import less_memory
from xformer.training.optimizers import SGD, Adam


@pytest.mark.parametrize(("optimizer", "copies"), [(Adam(), 4), (SGD(), 3), (SGD(momentum=0.0), 2)])
def test_a_model_that_is_too_large_alone(optimizer, copies):
    model = small_language_model()
    state, kib = optimizer.init(model), 1024.0
    least = copies * sum(array.nbytes for _, array in model.named_parameters())
    said = less_memory(TrainingSettings(), model, state, least - 1.0)
    assert said.startswith(f"parameters, gradients and the optimizer's state alone take {least / kib:.1f} KiB of ")
    assert "take a smaller model" in said
    assert "batch_tokens" not in said
    said = less_memory(TrainingSettings(), model, state, float(least))
    assert "KiB: lower batch_tokens (it is 2048) and raise accumulate" in said
    assert "smaller model" not in said


def test_where_nobody_knows_how_much_there_is():
    model = small_language_model()
    said = less_memory(LanguageModelSettings(), model, Adam().init(model), None)
    assert said.startswith("lower batch_size (it is 16)")
