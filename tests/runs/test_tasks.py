"""Tasks other than translation, by the same loop. (That of translation is tested with the trainer.)"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import pickle
import signal

import numpy as np
import pytest

from tests.reference import raises_line, small_language_model, small_model
from xformer.errors import DataError
from xformer.models import LanguageModel
from xformer.random import Rng
from xformer.training import (
    LanguageModelTask,
    RunDirectory,
    TokenPairs,
    Trainer,
    TrainingSettings,
    TranslationTask,
    Update,
)
from xformer.tree import flatten

TEXT = np.asarray([1, 2, 3, 4, 5, 6, 7, 8] * 40)
SETTINGS = TrainingSettings(
    optimizer="adamw", schedule="cosine", learning_rate=0.03, min_learning_rate=0.003, warmup_steps=5, max_updates=60,
    validate_every=30, label_smoothing=0.0, metric_for_best="loss", shards=2,
)  # fmt: skip


def make(path, settings=SETTINGS, xp="numpy", **options):
    path.mkdir(exist_ok=True)
    model = small_language_model(xp, dtype="float32", dropout=0.0)
    task = LanguageModelTask(model, TEXT, TEXT[:50], context_length=6, batch_size=4)
    return Trainer(model, task, settings, RunDirectory(path), **options)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_language_model_learns_its_text(tmp_path, library):
    pytest.importorskip(library)
    trainer = make(tmp_path, xp=library)
    before = trainer.validation_loss(trainer.model)
    assert trainer.run() == "60 updates"
    assert before > 2.0
    assert trainer.progress.best_loss < 0.5
    kept = LanguageModel.load(tmp_path / "model.safetensors", xp=np)
    assert kept([[1, 2, 3]])[0].argmax(axis=-1).tolist() == [2, 3, 4]


def test_a_resumed_run_of_a_language_model_has_the_bits_of_a_whole_one(tmp_path):
    settings = dataclasses.replace(SETTINGS, max_updates=12, validate_every=4, accumulate=2)
    whole = make(tmp_path / "whole", settings)
    whole.run()

    def interrupt(event):
        if isinstance(event, Update) and event.step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    make(tmp_path / "stopped", settings, report=interrupt).run()
    resumed = make(tmp_path / "stopped", settings)
    resumed.resume()
    assert resumed.progress.step == 6
    resumed.run()
    for one, other in zip(*(flatten((run.model, run.state[1:]))[0] for run in (whole, resumed)), strict=True):
        assert one.tobytes() == other.tobytes()


def test_the_validation_loss_is_the_mean_over_the_whole_text(tmp_path):
    trainer = make(tmp_path)
    model, text = trainer.model.to(dtype="float64"), TEXT[:50]
    total = 0.0
    for start in range(0, 49, 6):
        window = text[start : start + 7]
        logits = model(window[None, :-1])[0]
        logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        total -= sum(log[label] for log, label in zip(logs, window[1:], strict=True))
    assert trainer.validation_loss(model) == pytest.approx(total / 49, rel=1e-12)


def test_an_epoch_has_as_many_tokens_as_the_text():
    task = LanguageModelTask(small_language_model(), TEXT, TEXT, context_length=8, batch_size=4)
    assert [epoch for epoch, _ in itertools.islice(task.batches(Rng(0), skip=0, shards=1), 21)] == [0] * 10 + [
        1
    ] * 10 + [2]
    assert next(task.batches(Rng(0), skip=20, shards=1))[0] == 2


def test_shards_are_parts_of_the_batch_that_processes_can_exchange():
    model = small_language_model()
    tasks = [
        LanguageModelTask(model, TEXT, TEXT, context_length=8, batch_size=5),
        TranslationTask(small_model(), *[TokenPairs([[3]] * 5, [[4, 5]] * 5)] * 2, batch_tokens=15),
    ]
    for task in tasks:
        (_, (whole,)), (_, parts) = (next(task.batches(Rng(0), skip=3, shards=count)) for count in (1, 3))
        assert [len(part[0]) for part in parts] == [1, 2, 2]
        for one, others in zip(whole[:-1], zip(*(part[:-1] for part in parts), strict=True), strict=True):
            np.testing.assert_array_equal(one, np.concatenate(others))
        assert sum(part.num_tokens for part in parts) == whole.num_tokens
        loss, again = pickle.loads(pickle.dumps((task.loss, parts)))
        assert loss is task.loss
        assert math.isfinite(float(loss(model if task is tasks[0] else small_model(), again[0])))


def test_a_text_that_is_too_short_is_refused():
    with raises_line(DataError, "the training text has 8 tokens; expected at least 9"):
        LanguageModelTask(small_language_model(), TEXT[:8], TEXT, context_length=8, batch_size=4)
    with raises_line(DataError, "the validation text has 1 tokens"):
        LanguageModelTask(small_language_model(), TEXT, TEXT[:1], context_length=8, batch_size=4)
